"""A sweep of real runs: a failed cell is recorded, the others continue, and the same sweep runs only what is left."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

from launcher.__main__ import main
from tests.run.launching import TINY, status, steps
from tests.tiers import exhaustive

GRID = ("recipe=lm_single,lm_tied_pp2_hsdp2", "parallel.pipeline.scheduler=1f1b,gpipe")
CELLS = [
    "0-lm_single-1f1b", "1-lm_single-gpipe", "2-lm_tied_pp2_hsdp2-1f1b", "3-lm_tied_pp2_hsdp2-gpipe",
]  # fmt: skip


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as file:
        return {row["cell"]: row for row in csv.DictReader(file)}


@exhaustive
def test_a_sweep_of_real_runs(tmp_path, capsys):
    folder = tmp_path / "sweep"
    blocked = folder / CELLS[2] / "metrics.jsonl"  # a folder has the name of a file that this cell writes
    blocked.mkdir(parents=True)
    command = ["-m", f"sweep_dir={folder}", *GRID, *TINY, "train.steps=2", "steps=[train]"]
    assert main(command) == 1
    found = rows(folder)
    assert {cell: row["status"] for cell, row in found.items()} == {
        c: "failed" if c == CELLS[2] else "done" for c in CELLS
    }
    why = f"is not a run folder: {blocked} is not a file"
    assert found[CELLS[2]]["error"] == f"run_dir: {folder / CELLS[2]} {why}"
    assert float(found[CELLS[0]]["loss"]) > 0
    assert found[CELLS[0]]["loss"] == found[CELLS[1]]["loss"]  # on one rank all schedules are the same
    blocked.rmdir()
    kept = status(folder / CELLS[0])
    capsys.readouterr()
    assert main(command) == 0
    again = [line for line in capsys.readouterr().out.splitlines() if line.endswith(": already done")]
    assert [line.partition(" ")[2] for line in again] == [f"{cell}: already done" for cell in (*CELLS[:2], CELLS[3])]
    assert status(folder / CELLS[0]) == kept
    assert {row["status"] for row in rows(folder).values()} == {"done"}
    assert all(steps(folder / cell) == [1, 2] for cell in CELLS)


@exhaustive
def test_layouts_train_the_same_numbers_and_the_sweep_says_so(tmp_path, capsys):
    folder = tmp_path / "sweep"
    layouts = ("parallel.pipeline.stages=1,2", "parallel.pipeline.scheduler=1f1b,gpipe", "launch.nproc=2")
    shards = "parallel.hsdp={shard_size: -1, threshold: 0}"
    words = [*TINY, shards, *layouts, "train.steps=6", "train.precision=fp64", "sweep.certify=true", "steps=[train]"]
    assert main(["-m", f"sweep_dir={folder}", *words]) == 0
    assert re.search(
        r"the losses of \d cells differ by at most \d\.\de-1[3-7] from those of the same run in another layout",
        capsys.readouterr().out,
    )
    found = rows(folder)
    assert {row["status"] for row in found.values()} == {"done"}
    assert all(float(row["gap"]) < 1e-12 for row in found.values() if row["gap"])

    # change a number in one of them
    path = folder / list(found)[2] / "metrics.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | {"loss": 4.0}), *others]) + "\n")
    assert main(["-m", f"sweep_dir={folder}", *words]) == 1
    assert f"{list(found)[2]}: losses differ from {next(iter(found))} by " in capsys.readouterr().out
