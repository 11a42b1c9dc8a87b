"""Sweeps on a real Slurm: cells that fail or are preempted end as if nothing had happened, each of them once."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.run.launching import TINY, run, shape, status
from tests.slurm.cluster import missing, until
from tests.slurm.test_jobs import SLOW_S, is_, same, trained

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(900)]
N = 60
CELL = (*shape(pp=2), "checkpoint.every=10")


def sweep(grid: Path, *more: str) -> int:
    place = ("launch=slurm", "launch.device=cpu", "launch.nproc=2")
    return main(["-m", f"sweep_dir={grid}", *TINY, *CELL, *place, f"train.steps={N}", *more])


def numbers(grid: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((grid / "jobs.json").read_text())
    return found


def queued(number: str) -> bool:
    done = subprocess.run(["squeue", "-h", "--array", "-o", "%i"], check=True, capture_output=True, text=True)
    return any(each.partition("_")[0] == number for each in done.stdout.split())


def rows(grid: Path) -> dict[str, str]:
    with (grid / "summary.csv").open(newline="") as file:
        return {row["cell"]: row["status"] for row in csv.DictReader(file)}


def ranks(cell: Path) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"run_dir={cell}".encode() in words and b"srun" not in words[0]:
            found.append(int(folder.name))
    return found


def alone(folder: Path, seed: int) -> Path:
    return run(folder, *CELL, f"seed={seed}", steps=N)


def test_an_array_of_which_one_cell_fails_and_one_is_preempted(cluster: None, tmp_path: Path) -> None:
    grid, words = tmp_path / "grid", ("seed=1,2,3,4", "launch.slurm.array_parallel=3")
    assert sweep(grid, *words) == 0
    cells = [grid / f"{n}-{n + 1}" for n in range(4)]
    number = numbers(grid)["0-1"].partition("_")[0]
    assert numbers(grid) == {cell.name: f"{number}_{n}" for n, cell in enumerate(cells)}

    # the first is requeued, the second loses a rank
    until(lambda: trained(cells[0], 15), SLOW_S, "the first does not start")
    subprocess.run(["scontrol", "requeue", f"{number}_0"], check=True)
    until(lambda: trained(cells[1], 15), SLOW_S, "the second does not start")
    os.kill(ranks(cells[1])[-1], signal.SIGKILL)
    until(lambda: not queued(number), 2 * SLOW_S, "the array does not end")
    assert [status(cell)["status"] == "done" for cell in cells] == [True, False, True, True]

    # only what failed is submitted again
    assert sweep(grid, *words) == 0
    assert numbers(grid)["1-2"].partition("_")[0] != number
    text = (grid / "cells-2.sbatch").read_text()
    assert (str(cells[1]) in text, str(cells[0]) in text) == (True, False)
    until(lambda: is_(cells[1], "done"), SLOW_S, "the second does not go on")
    until(lambda: not queued(numbers(grid)["1-2"].partition("_")[0]), SLOW_S, "the second array does not end")
    assert sweep(grid, *words) == 0
    assert rows(grid) == dict.fromkeys((cell.name for cell in cells), "done")
    assert not (grid / "cells-3.sbatch").exists()

    for n, cell in enumerate(cells[:2]):
        same(cell, alone(tmp_path / f"alone{n}", n + 1), N)


def test_cells_that_share_an_allocation_are_told_to_stop(cluster: None, tmp_path: Path) -> None:
    grid, words = tmp_path / "grid", ("seed=1,2", "launch.slurm.array=false")
    assert sweep(grid, *words) == 0
    cells = [grid / "0-1", grid / "1-2"]
    number = numbers(grid)["0-1"]
    until(lambda: any(trained(cell, 5) for cell in cells), SLOW_S, "none starts")
    subprocess.run(["scancel", "--signal=USR2", number], check=True)
    until(lambda: all((cell / "metrics.jsonl").exists() and is_(cell, "done") for cell in cells), 2 * SLOW_S, "no end")
    until(lambda: not queued(number), SLOW_S, "the allocation does not end")
    assert sweep(grid, *words) == 0
    assert rows(grid) == {"0-1": "done", "1-2": "done"}
    for n, cell in enumerate(cells):
        same(cell, alone(tmp_path / f"alone{n}", n + 1), N)
