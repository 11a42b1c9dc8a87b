"""``launcher status``, ``logs`` and ``cancel`` of a sweep folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.extras.sweep import folder
from launcher.runtime.run_folder import write_status

ROW = {"step": 5, "steps": 10, "loss": 2.5, "tokens_per_s": 2000.0, "step_ms": 40.0}
TORN = '{"step": 6, "los'


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Five cells: done, failed, partly trained in a Slurm job, pruned, and not begun."""
    at = tmp_path / "sweep"
    names = ["0-1", "1-2", "2-3", "3-4", "4-5"]
    states = [{"status": "done"}, {"status": "failed", "error": "no disk"}, {"status": "running", "slurm": "7_2"},
              {"status": "interrupted"}]  # fmt: skip
    for name, said in zip(names, states, strict=False):
        (at / name).mkdir(parents=True)
        write_status(at / name, **said)
    (at / "2-3" / "metrics.jsonl").write_text(json.dumps(ROW) + "\n" + TORN)
    (at / folder.INDEX).write_text(json.dumps({name: [f"seed={name[2:]}"] for name in names}))
    folder.prune(at, "3-4", "val_loss 9.1 at step 4, others 3.0")
    return at


def test_status_shows_the_progress_of_each_cell(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(sweep)]) == 0
    assert capsys.readouterr().out == (
        "0-1: done\n"
        "1-2: failed: no disk\n"
        "2-3: running; step 5 of 10, loss 2.5000, 2.0k tokens/s, 40.0 ms a step\n"
        "3-4: pruned: val_loss 9.1 at step 4, others 3.0\n"
        "4-5: no run yet\n"
        f"{sweep}: 5 cells: 1 done, 1 failed, 1 running, 1 pruned, 1 no run yet\n"
    )


def test_jobs_of_slurm_that_are_not_over_are_cancelled_in_one_call(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = {"scancel": f"echo $@ >>{tmp_path}/cancelled", "squeue": "echo 7_2; echo 7_4; echo 9"}
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (sweep / "jobs.json").write_text(json.dumps({"4-5": "7_4", "0-1": "7_0"}))  # the last submission
    for name, more in {"4-5": {}, "1-2": {"slurm": "6_1"}}.items():  # the second was killed with its job
        (sweep / name).mkdir(exist_ok=True)
        write_status(sweep / name, status="submitted", **more)
    assert main(["cancel", str(sweep)]) == 0
    assert (tmp_path / "cancelled").read_text() == "7_2 7_4\n"
    assert capsys.readouterr().out == (
        "cancelled 2 jobs of Slurm; cells that were training save, and the sweep's command resumes them\n"
    )


def test_where_slurm_is_not_its_jobs_are_not_cancelled(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for place in (sweep, sweep / "2-3"):
        assert main(["cancel", str(place)]) == 1
        asked = "squeue" if place == sweep else "scancel"
        cure = "use a login node of the cluster"
        assert capsys.readouterr().err == f"error: {asked}: there is no such command on this machine; {cure}\n"


def test_cells_that_run_here_are_not_cancelled(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(sweep / "2-3", status="running")
    assert main(["cancel", str(sweep)]) == 1
    assert capsys.readouterr().err == (
        f"error: {sweep}: no cell is a queued or running Slurm job; cells that run on this machine end with the sweep\n"
    )


def test_each_cell_has_a_log_of_its_own(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(sweep)]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  logs {sweep}: is a sweep, and each cell has its own log: launcher logs {sweep}/0-1\n"
    )


def test_a_cell_is_a_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(sweep / "1-2")]) == 0
    assert capsys.readouterr().out == f"{sweep}/1-2: failed: no disk\n"
