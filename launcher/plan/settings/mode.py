"""``parallel.mode``: who decides how operators are cut: what is written, or a search for what is not."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job

KEY = "parallel.mode"
OPERATORS = "parallel.operators"


def searches(job: Job) -> bool:
    """Whether strategies that nobody wrote are searched for."""
    return job.parallel.mode != "semi_auto"


def refused(job: Job) -> Iterator[Problem]:
    """A search that has nothing to decide, or that would not keep what is written."""
    mode, launch = job.parallel.mode, job.launch
    if not searches(job):
        return
    if mode == "recursive_programming" and job.parallel.operators:
        text = f"{mode} finds every strategy itself; sharding_propagation keeps those that are written"
        yield Problem(KEY, text, quote(f"{KEY}=sharding_propagation"))
    stages = job.parallel.pipeline.stages
    if launch.nproc is not None and launch.nproc * launch.nnodes == stages:
        text = f"{mode} has nothing to decide: each stage has one rank"
        yield Problem(KEY, text, quote(f"{KEY}=semi_auto"))
