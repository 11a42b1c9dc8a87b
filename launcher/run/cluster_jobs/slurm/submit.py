"""Hands a run to Slurm: planned here, frozen in its run folder, submitted."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.console import say
from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.run.cluster_jobs import frozen_request
from launcher.run.cluster_jobs.slurm import batch_file, cluster, stop_signal
from launcher.run.cluster_jobs.slurm.batch_file import Place, Ranks

KEY = cluster.KEY
EARLY_S = 60
"""Seconds by which Slurm may send a signal too early, according to the manual of sbatch."""


def refused(job: Job, outer: int | None) -> list[Problem]:
    """Problems that show before there is a plan; ``outer``: ranks that torchrun or srun has started."""
    slurm = job.launch.slurm
    if slurm is None:
        return []
    problems = frozen_request.refused(job, KEY, "Slurm", outer)
    if outer is not None:
        return problems
    problems = [*cluster.problems(slurm), *problems]
    seconds = None if slurm.time is None else time_s(slurm.time)
    before = stop_signal.resolved(slurm, _run(job))[0].signal_s or 0
    if seconds is not None and seconds <= before + EARLY_S:
        text = f"{slurm.time}: ranks would be told to save when they have hardly begun: {KEY}.signal_s is"
        text += f" {before} s before the end, and Slurm may send it {EARLY_S} s earlier"
        problems.append(Problem(f"{KEY}.time", text))
    return problems


def _run(job: Job) -> tuple[Path, ...]:
    """The run folder, if the run has been started before."""
    return () if job.run_dir is None else (Path(job.run_dir),)


def submit(job: Job, plan: Plan, run: Path) -> str:
    """Writes the job into the run folder, and submits it to Slurm.

    Returns the job number, or "" if the job is only written. Raises ``RunError``.
    """
    assert job.launch.slurm is not None
    slurm, note = stop_signal.resolved(job.launch.slurm, (run,))
    if note is not None:
        say(str(note))
    from launcher.runtime.cluster.signed_messages import private_file  # imports torch

    secret = private_file(run.absolute() / batch_file.SECRET)
    at = Place(run.absolute(), Path.cwd(), Path(os.path.abspath(sys.executable)), secret)
    ranks = ranks_of(job, frozen_request.write(job, plan, run))
    write_text(run / batch_file.NAME, batch_file.text(job.name, slurm, ranks, at))
    if not slurm.submit:
        return ""
    return sbatch(at.run / batch_file.NAME)


def ranks_of(job: Job, each: int) -> Ranks:
    """The ranks of the job; ``each``: per node."""
    return Ranks(job.launch.nnodes, each, job.launch.device != "cpu", job.launch.max_restarts)


def sbatch(file: Path) -> str:
    """Submits ``file``; returns the job number. Raises ``RunError``."""
    return cluster.ask(["sbatch", "--parsable", str(file)]).strip().partition(";")[0]


def time_s(text: str) -> float:
    """Seconds of a time as Slurm writes it: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    >>> time_s("30"), time_s("1:30"), time_s("02:00:00"), time_s("1-12")
    (1800.0, 90.0, 7200.0, 129600.0)
    """
    days, dash, clock = text.rpartition("-")
    parts = [int(n) for n in re.split(":", clock)]
    if dash:
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:
        parts = [0, parts[0], 0]
    elif len(parts) == 2:
        parts = [0, *parts]
    hours, minutes, seconds = parts
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)
