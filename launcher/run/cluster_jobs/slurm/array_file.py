"""Batch files for many runs of one size: an array with a task per run, or a shared allocation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from launcher.errors import REQUEUE
from launcher.job.schema.job import Slurm
from launcher.run.cluster_jobs import frozen_request
from launcher.run.cluster_jobs.slurm import batch_file
from launcher.run.cluster_jobs.slurm.batch_file import KILLED, Ranks

NUMBERS = "jobs.json"
"""A file beside the run folders: the job number of each run, by name."""
LOG = '"${run//%/%%}/slurm-$SLURM_JOB_ID.log"'
"""The log of a run's ranks, in its run folder."""


@dataclass(frozen=True)
class ManyRuns:
    """Many runs: ``runs`` are their folders, with ``ranks`` each; ``folder``: that of the batch file.

    All paths are absolute. ``started``: where the sweep was started; ``secret``: as in ``Place``.
    """

    name: str
    runs: tuple[Path, ...]
    ranks: Ranks
    slurm: Slurm
    folder: Path
    started: Path
    python: Path
    secret: Path | None = None


def text(many: ManyRuns) -> str:
    """The batch file: each run has its folder, and runs again whenever Slurm restarts it."""
    made = [*_array(many)] if many.slurm.array else [*_allocation(many)]
    return "\n".join(["#!/bin/bash", *made]) + "\n"


def _array(many: ManyRuns) -> Iterator[str]:
    most = many.slurm.array_parallel
    yield "# Written by launcher: a task of this array is one run, which is requeued by itself."
    yield from _head(many, many.ranks, "%A_%a")
    yield f"#SBATCH --array=0-{len(many.runs) - 1}{'' if most is None else f'%{most}'}"
    yield from batch_file.prologue(many.slurm, many.ranks, many.started, many.secret)
    yield from _runs(many.runs)
    yield "run=${runs[$SLURM_ARRAY_TASK_ID]}"
    yield f"{many.ranks.start} {_said(many.slurm)}{_command(many)}"
    yield "code=$?"
    yield f'if [ "$code" -eq {REQUEUE} ] || [ "$code" -eq {KILLED} ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'


def _allocation(many: ManyRuns) -> Iterator[str]:
    """Requests the steps of all runs at once; each waits until there is room."""
    most, ranks = many.slurm.array_parallel or 1, many.ranks
    size = f"--nodes={ranks.nodes} --ntasks={ranks.nodes * ranks.each} --ntasks-per-node={ranks.each}"
    yield "# Written by launcher: the runs share this allocation, each has nodes of its own while it runs."
    yield from _head(many, replace(ranks, nodes=ranks.nodes * most), "%j")
    yield from batch_file.prologue(many.slurm, ranks, many.started, many.secret)
    yield from _runs(many.runs)
    yield "tasks=()"
    yield 'for run in "${runs[@]}"; do'
    yield f"    {ranks.start} --exclusive {size} {_said(many.slurm)}{_command(many)} &"
    yield "    tasks+=($!)"
    yield "done"
    yield "stopped=0 failed=0"
    yield 'for task in "${tasks[@]}"; do'
    yield '    wait "$task"'
    yield "    code=$?"
    yield f'    if [ "$code" -eq {REQUEUE} ] || [ "$code" -eq {KILLED} ]; then'
    yield "        stopped=1"
    yield '    elif [ "$code" -ne 0 ]; then'
    yield "        failed=1"
    yield "    fi"
    yield "done"
    yield 'if [ "$stopped" -eq 1 ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID"  # runs that are done say so, and are not done again'
    yield "fi"
    yield 'exit "$failed"'


def _head(many: ManyRuns, ranks: Ranks, job: str) -> Iterator[str]:
    output = batch_file.log(many.folder, job)
    for option in batch_file.options(many.name, many.slurm, ranks, output):
        yield f"#SBATCH --{option}"


def _runs(runs: Sequence[Path]) -> Iterator[str]:
    yield "runs=("
    yield from (f"    {quote(str(run))}" for run in runs)
    yield ")"


def _said(slurm: Slurm) -> str:
    return f"--output={LOG} --open-mode=append {batch_file.container(slurm)}"


def _command(many: ManyRuns) -> str:
    return f'{quote(str(many.python))} -m launcher "recipe=$run/{frozen_request.NAME}" "run_dir=$run"'
