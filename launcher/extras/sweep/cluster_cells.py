"""Runs cells of a sweep on a cluster: freezes and submits them by size; failed ones are submitted again."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.errors import Problem
from launcher.extras.sweep import cell_process, folder
from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.requests import CheckedCell, SweepRequest
from launcher.job.compose import BadRequest, Request, compose
from launcher.job.overrides import quoted
from launcher.job.schema.launch import Slurm
from launcher.job.sweep_grid import Cell
from launcher.run import slurm as slurm_jobs
from launcher.run import slurm_files
from launcher.run.slurm_files import ManyRuns, RankLayout

Size = tuple[RankLayout, Slurm]


def refuse_long_array(sweep_request: SweepRequest, checked: Sequence[CheckedCell]) -> None:
    """Raises ``BadRequest`` if the cells of one size are more than an array of the cluster may have tasks."""
    slurm = sweep_request.first.job.launch.slurm
    if slurm is None or not slurm.submit or not slurm.array:
        return
    most = slurm_jobs.longest_array()
    sizes = Counter((one.forecast.nodes, one.forecast.ranks) for one in checked if one.forecast is not None)
    longest = max(sizes.values(), default=0)
    if most is not None and longest >= most:
        text = f"true: {longest} cells of one size need an array, but this cluster allows at most"
        text = f"{text} {most - 1} tasks (MaxArraySize)"
        problem = Problem("launch.slurm.array", text, "launch.slurm.array=false")
        raise BadRequest((problem,), sweep_request.first.origins)


def submitted(
    sweep_request: SweepRequest, at: Path, checked: Sequence[CheckedCell]
) -> tuple[CellResult, ...]:
    """Returns the known result of each cell; submits those that are missing or failed.

    Raises ``RunError``.
    """
    numbers = folder.texts(at / slurm_files.NUMBERS)
    slurm = sweep_request.first.job.launch.slurm
    alive = slurm_jobs.jobs() if numbers and slurm is not None and slurm.submit else frozenset()
    results: dict[str, CellResult] = {}
    sizes: dict[Size, list[Cell]] = {}
    first: dict[str, str] = {}
    for one in checked:
        cell, number = one.cell, numbers.get(one.cell.name, "")
        twin = cell.name if one.forecast is None else first.setdefault(one.forecast.digest, cell.name)
        done = cell_process.known_result(at, cell)
        if twin != cell.name:
            results[cell.name] = replace(results[twin], cell=cell, same_as=twin)
        elif done is not None and (done.status == "done" or number in alive):
            results[cell.name] = done
        elif number in alive:
            results[cell.name] = CellResult(cell, "submitted", error=f"job {number} of Slurm")
        elif one.refused:
            results[cell.name] = CellResult(cell, "refused", error=one.refused)
        else:
            results[cell.name] = CellResult(cell, "submitted")
            sizes.setdefault(_frozen(sweep_request, at, cell), []).append(cell)
    for size, cells in sizes.items():
        number = _submit(sweep_request, at, size, cells)
        for n, cell in enumerate(cells):
            mine = f"{number}_{n}" if size[1].array else number
            numbers[cell.name] = mine
            note = f"job {mine} of Slurm" if number else "not submitted"
            results[cell.name] = CellResult(cell, "submitted" if number else "written", error=note)
        write_text(at / slurm_files.NUMBERS, json.dumps(numbers, indent=1) + "\n")
    return tuple(results[one.cell.name] for one in checked)


def _frozen(sweep_request: SweepRequest, at: Path, cell: Cell) -> Size:
    """Freezes the cell's request in its folder; returns its ranks and its Slurm settings."""
    from launcher.run.run import freeze

    words = (*cell.overrides, f"run_dir={quoted(str(at / cell.name))}")
    request: Request = compose(words, config_dir=sweep_request.config_dir)
    job, plan = freeze(request, words)
    assert job.launch.slurm is not None
    return slurm_jobs.ranks_of(job, plan.sizes.grid.size // job.launch.nnodes), job.launch.slurm


def _submit(sweep_request: SweepRequest, at: Path, size: Size, cells: Sequence[Cell]) -> str:
    """Submits the cells; returns the number of the job, or "" if the batch file is only written."""
    from launcher.runtime.cluster.messages import private_file  # imports torch

    runs = tuple((at / cell.name).absolute() for cell in cells)
    ranks = size[0]
    slurm, _ = slurm_jobs.with_signal_s(size[1], runs)
    many = ManyRuns(
        name=f"sweep-{at.name}",
        runs=runs,
        ranks=ranks,
        slurm=slurm,
        folder=at.absolute(),
        started=Path.cwd(),
        python=Path(os.path.abspath(sys.executable)),
        secret=private_file(at.absolute() / slurm_files.SECRET),
    )
    count = sum(1 for _ in at.glob("cells-*.sbatch"))
    file = at / f"cells-{count + 1}.sbatch"
    write_text(file, slurm_files.array_text(many))
    each = f"{ranks.nodes} x {ranks.each} ranks"
    if not slurm.submit:
        print(f"{len(cells)} cells of {each}, not submitted: sbatch {shlex.quote(str(file))}", flush=True)
        return ""
    number = slurm_jobs.sbatch(file.absolute())
    print(f"{len(cells)} cells of {each}: job {number} of Slurm, {file}", flush=True)
    return number
