"""``parallel.mode``: whether strategies of operators are only those written, or a search finds the others."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job

KEY = "parallel.mode"


def searches(job: Job) -> bool:
    """Whether a search finds the strategies of operators that have none."""
    return job.parallel.mode != "semi_auto"


def refused(job: Job) -> Iterator[Problem]:
    """Yields a problem if the search would ignore the strategies that are written."""
    mode = job.parallel.mode
    if mode == "recursive_programming" and job.parallel.operators:
        text = f"{mode} finds every strategy itself; sharding_propagation keeps those that are written"
        yield Problem(KEY, text, quote(f"{KEY}=sharding_propagation"))
