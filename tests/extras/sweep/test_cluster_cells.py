"""Cells that Slurm runs: their code is frozen, they are submitted by size, and only missing or failed ones again."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.runtime.run_folder import write_status
from tests.extras.sweep.test_settings import LINE
from tests.run.launching import status

COMMANDS = {
    "sbatch": '#!/bin/bash\necho "$@" >> submitted\necho $((76 + $(wc -l < submitted)))\n',
    "squeue": '#!/bin/bash\necho "$@" >> asked\ncat queue\n',
    "sinfo": "#!/bin/bash\necho debug\n",
    "scontrol": "#!/bin/bash\necho 'MaxArraySize            = 4'\n",
}
GRID = (*LINE, "launch=slurm", "launch.device=cpu", "sweep_dir=grid", "train.batch_size=16", "optim.lr=1e-3,1e-2")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, with fake Slurm commands."""
    for name, text in COMMANDS.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    (tmp_path / "queue").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(folder: Path) -> dict[str, str]:
    with (folder / "grid/summary.csv").open(newline="") as file:
        return {row["cell"]: row["status"] for row in csv.DictReader(file)}


def tasks(file: Path) -> list[str]:
    text = file.read_text()
    return [Path(line.strip()).name for line in text.partition("runs=(\n")[2].partition(")\n")[0].splitlines()]


def test_cells_of_one_size_are_one_array(place, capsys):
    assert main([*GRID, "launch.nproc=1,2", "launch.slurm.array_parallel=5"]) == 0
    assert (place / "submitted").read_text().splitlines() == [
        f"--parsable {place}/grid/cells-1.sbatch", f"--parsable {place}/grid/cells-2.sbatch",
    ]  # fmt: skip
    assert tasks(place / "grid/cells-1.sbatch") == ["0-0.001-1", "2-0.01-1"]
    assert tasks(place / "grid/cells-2.sbatch") == ["1-0.001-2", "3-0.01-2"]
    assert "#SBATCH --array=0-1%5\n" in (place / "grid/cells-1.sbatch").read_text()
    assert json.loads((place / "grid/jobs.json").read_text()) == {
        "0-0.001-1": "77_0", "2-0.01-1": "77_1", "1-0.001-2": "78_0", "3-0.01-2": "78_1",
    }  # fmt: skip
    assert {*rows(place).values()} == {"submitted"}
    out = capsys.readouterr().out
    assert "2 cells of 1 x 1 ranks: job 77 of Slurm, grid/cells-1.sbatch" in out
    assert out.endswith(
        "0 of 4 done, grid/summary.csv, report.html; to show their state and submit failed cells again:"
        " -m sweep_dir=grid and the same overrides\n"
    )
    run_dir = place / "grid/0-0.001-1"
    assert status(run_dir)["status"] == "submitted"
    assert {"request.yaml", "plan.json", "versions.json"} <= {p.name for p in run_dir.iterdir()}


def test_a_frozen_cell_runs_as_its_task_would_and_counts(place, capsys):
    assert main(list(GRID)) == 0
    cell = place / "grid/0-0.001"
    request = (cell / "request.yaml").read_text().replace("mode: external", "mode: inproc")
    (cell / "request.yaml").write_text(request)
    assert main([f"recipe={cell}/request.yaml", f"run_dir={cell}"]) == 0
    (place / "queue").write_text("77_1\n")
    capsys.readouterr()
    assert main(list(GRID)) == 0
    assert rows(place) == {"0-0.001": "done", "1-0.01": "submitted"}
    assert (place / "submitted").read_text().count("\n") == 1
    assert (place / "asked").read_text() == "--noheader --array --me --format=%i\n"
    assert "1 of 2 done" in capsys.readouterr().out


def test_failed_and_vanished_cells_are_submitted_again(place):
    assert main(list(GRID)) == 0
    cell = place / "grid/1-0.01"
    write_status(cell, status="failed", overrides=[f"recipe={cell}/request.yaml", f"run_dir={cell}"], error="rank 0")
    (place / "queue").write_text("77_0\n")
    assert main(list(GRID)) == 0
    assert tasks(place / "grid/cells-2.sbatch") == ["1-0.01"]
    (place / "queue").write_text("78_0\n")
    assert main(list(GRID)) == 0
    assert tasks(place / "grid/cells-3.sbatch") == ["0-0.001"]
    assert json.loads((place / "grid/jobs.json").read_text()) == {"0-0.001": "79_0", "1-0.01": "78_0"}


def test_cells_may_share_an_allocation(place):
    assert main([*GRID, "launch.slurm.array=false"]) == 0
    assert "--array" not in (place / "grid/cells-1.sbatch").read_text()
    assert json.loads((place / "grid/jobs.json").read_text()) == {"0-0.001": "77", "1-0.01": "77"}


def test_cells_may_be_written_only(place, capsys):
    assert main([*GRID, "launch.slurm.submit=false"]) == 0
    assert not (place / "submitted").exists()
    assert rows(place) == {"0-0.001": "written", "1-0.01": "written"}
    assert "2 cells of 1 x 1 ranks, not submitted: sbatch grid/cells-1.sbatch" in capsys.readouterr().out


def test_a_cell_that_waits_knows_its_job(place, capsys):
    assert main(list(GRID)) == 0
    (place / "queue").write_text("PENDING on , 0:00 of 1:00, Priority\n")
    capsys.readouterr()
    assert main(["status", "grid/1-0.01"]) == 0
    assert capsys.readouterr().out == (
        "grid/1-0.01: submitted\njob 77_1 of Slurm: PENDING on , 0:00 of 1:00, Priority\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["seed=1,2"],
            """
  launch.slurm.array = true: 4 cells of one size need an array, but this cluster allows at most 3 tasks \
(MaxArraySize)
    set in: conf/launch/slurm.yaml:LINE
          |   array: true          # a sweep is one array job per size of cells; false: one allocation that all \
cells share
    try:    launch.slurm.array=false
""",
        ),
        (
            ["sweep.sampler=random", "sweep.cells=2"],
            """
  sweep.sampler = random: needs the results of earlier cells, which a cluster reports too late; use launch=auto \
inside an allocation
    set by: sweep.sampler=random (command line)
""",
        ),
    ],
    ids=["long-array", "sampler"],
)
def test_sweeps_that_the_cluster_cannot_run_are_refused(words, told, place, capsys):
    pytest.importorskip("optuna", reason="optuna is not installed")
    assert main([*GRID, *words]) == 2
    found = re.sub(r"(?<=slurm.yaml:)[\d:]+", "LINE", capsys.readouterr().err)
    assert found == f"error: 1 problem in this request; nothing was started\n{told}"
    assert not (place / "grid").exists()
