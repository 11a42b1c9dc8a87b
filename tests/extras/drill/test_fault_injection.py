"""Drills: each fault happens once, the run survives it, and its cost is reported to the step and to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RunError
from launcher.extras.drill import report
from launcher.plan.drill import DrillFault
from launcher.plan.resolve.encryption import ANYONE
from tests.run.launching import TINY, checkpoints, metrics, run, status, steps, tensors, torchrun

SAVING = ("checkpoint.every=2", "launch.max_restarts=1")
SAME = "bit-identical  yes, all 152 tensors of weights, optimizer and random streams"


def drilled(folder: Path, fault: str, *overrides: str) -> dict[str, Any]:
    """Run a drill of six steps, which must succeed, and return its ``drill.json``."""
    run(folder, *SAVING, f"debug.drill={{{fault}}}", *overrides, steps=6)
    said: dict[str, Any] = json.loads((folder / "drill.json").read_text())
    assert (said["bit_identical"], said["differing"]) == (True, [])
    return said


LOST = {  # the step after which training resumes, and the number of repeated steps
    "kill_rank: {rank: 1, step: 4}": (2, 1),
    "hang_rank: {rank: 2, step: 4}": (2, 1),
    "torn_write: {rank: 1, step: 4}": (2, 2),
    "bitflip: {rank: 3, step: 6}": (2, 3),
    "disk_full: {rank: 0, step: 4}": (2, 2),
}


@pytest.mark.parametrize("fault", LOST, ids=lambda f: f.partition(":")[0])
def test_the_run_comes_through_a_fault_and_says_what_it_cost(fault, tmp_path, capfd, caplog):
    folder = tmp_path / "run"
    said = drilled(folder, fault, "launch.timeout_s=10")
    assert (said["resumed_step"], said["steps_lost"]) == LOST[fault]
    assert 0 < said["detected_s"] < said["recovered_s"]
    assert (said["detected_s"] > 10) == fault.startswith("hang")

    # the run is one complete training, which was restarted once
    assert (status(folder)["status"], steps(folder), checkpoints(folder)) == (
        "done", [1, 2, 3, 4, 5, 6], ["step-000004", "step-000006"],
    )  # fmt: skip
    assert len([m for m in caplog.messages if m.endswith("; starting again")]) == 1
    told = capfd.readouterr().out
    assert re.sub(r"[\d.]+ s\b", "S s", told[told.index("drill of") :]).splitlines()[:5] == [
        f"drill of {said['drill']}",
        "  detected       after S s",
        f"  recovered      after S s, resumed after step {LOST[fault][0]}",
        f"  steps lost     {LOST[fault][1]}",
        f"  {SAME}",
    ]


def test_the_undisturbed_run_is_the_run_without_the_drill(tmp_path):
    drilled(tmp_path / "run", "kill_rank: {rank: 0, step: 3}")
    straight = tensors(run(tmp_path / "straight", steps=6), 6)
    assert tensors(tmp_path / "run/drill/undisturbed", 6) == straight == tensors(tmp_path / "run", 6)
    assert not (tmp_path / "straight/drill").exists()


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, capfd):
    drilled(tmp_path / "run", "bitflip: {rank: 1, step: 5}")
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "damaged and skipped" in line]
    where = f"{tmp_path}/run/checkpoints/step-000004/rank_1/model.safetensors"
    why = rf"{where}: tensor \S+ is damaged: its digest is \w+, the manifest says \w+"
    assert re.fullmatch(f"step-000004 is damaged and skipped: {why}", line)


LAYOUTS = {
    "stages and shards": (),
    "replicas": (
        "parallel.pipeline.stages=1", "launch.nproc=2", "parallel.hsdp={shard_size: 1, threshold: 0}",
    ),
    "stages": ("parallel.pipeline.stages=2", "launch.nproc=2", "parallel.hsdp={shard_size: 1, threshold: 0}"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slow_rank_is_named_in_every_row(layout, tmp_path, capfd):
    folder = tmp_path / "run"
    said = drilled(folder, "slow_rank: {rank: 1, step: 3, ms: 400}", *LAYOUTS[layout], "launch.max_restarts=0")
    assert (said["steps_lost"], said["recovered_s"] is None, said["detected_s"] > 0.4) == (0, True, True)
    rows = [row for row in metrics(folder) if row["step"] >= 3]
    assert [row["worst_rank"] for row in rows] == [1, 1, 1, 1]
    assert all(row["step_ms_worst"] >= 400 and row["step_ms"] >= 400 for row in rows)
    assert "recovered" not in capfd.readouterr().out


def test_ranks_are_told_apart_where_rows_are_rare_too(tmp_path):
    folder = tmp_path / "run"
    drilled(folder, "slow_rank: {rank: 2, step: 3, ms: 300}", "train.log_every=6")
    (row,) = metrics(folder)
    assert row["worst_rank"] == 2
    assert row["step_ms_worst"] >= 4 * 300 / 6  # the mean of the six steps


def test_where_training_goes_on_without_a_checkpoint_a_full_disk_costs_no_step(tmp_path):
    more = ("checkpoint.on_error=continue", "launch.max_restarts=0")
    said = drilled(tmp_path / "run", "disk_full: {rank: 1, step: 4}", *more)
    assert (said["steps_lost"], said["recovered_s"]) == (0, None)
    assert status(tmp_path / "run")["metrics"]["unsaved"] == 1


@pytest.mark.parametrize("fault", ["kill_rank: {rank: 3, step: 4}", "torn_write: {rank: 1, step: 4}"])
def test_a_thread_that_saves_loses_no_more_than_its_checkpoint(fault, tmp_path):
    said = drilled(tmp_path / "run", fault, "checkpoint.async=true")
    assert said["resumed_step"] in (0, 2)  # a checkpoint may not be complete yet when the fault comes


def test_a_drill_of_another_training_is_not_identical(tmp_path):
    drilled(tmp_path / "run", "kill_rank: {rank: 1, step: 4}")
    run(tmp_path / "other", "seed=1", steps=6)
    fault = DrillFault("kill_rank", (1,), 4)
    lines: list[str] = []
    with pytest.raises(RunError) as error:
        report.finish(tmp_path / "run", tmp_path / "other", fault, ANYONE, lines.append, True)
    first = "step-000006/rank_0/model.safetensors: embed.weight"
    assert str(error.value) == (
        f"drill of kill_rank of rank 1 in step 4: the checkpoint differs from that of the undisturbed run: {first}"
    )
    assert re.search(r"\n  bit-identical  no, \d+ of 152 tensors differ$", lines[0])


def test_a_drill_that_comes_to_nothing_fails(tmp_path):
    folder = run(tmp_path / "run", steps=3)
    lines: list[str] = []
    with pytest.raises(RunError) as error:
        report.finish(folder, folder, DrillFault("kill_rank", (1,), 4), ANYONE, lines.append, True)
    assert str(error.value) == "drill: kill_rank of rank 1 in step 4 did not happen: training ended first"
    assert lines == []


@pytest.mark.parametrize(("fault", "lost"), [("lose_node: {node: 0, step: 4}", 1), ("bitflip: {rank: 0, step: 6}", 3)])
def test_torchrun_starts_the_ranks_again(fault, lost, tmp_path):
    words = (*TINY, f"run_dir={tmp_path}/run", "train.steps=6", "checkpoint.every=2", "launch.timeout_s=20")
    done = torchrun(4, *words, f"debug.drill={{{fault}}}", restarts=1)
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "run/drill.json").read_text())
    assert (said["steps_lost"], said["resumed_step"], said["bit_identical"]) == (lost, 2, True)
    assert SAME in done.stdout
