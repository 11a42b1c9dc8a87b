"""``parallel.mode``: who decides how operators are cut: what is written, or a search for what is not."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job

KEY = "parallel.mode"


def searches(job: Job) -> bool:
    """Whether strategies that nobody wrote are searched for."""
    return job.parallel.mode != "semi_auto"


def refused(job: Job) -> Iterator[Problem]:
    """A search that would not keep what is written."""
    mode = job.parallel.mode
    if mode == "recursive_programming" and job.parallel.operators:
        text = f"{mode} finds every strategy itself; sharding_propagation keeps those that are written"
        yield Problem(KEY, text, quote(f"{KEY}=sharding_propagation"))
