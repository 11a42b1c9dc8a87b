"""``parallel.mode``: whether a search finds strategies of operators."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job

MODE_KEY = "parallel.mode"


def searches(job: Job) -> bool:
    """Returns true if a search finds the strategies of operators that have none."""
    return job.parallel.mode != "semi_auto"


def problems(job: Job) -> Iterator[Problem]:
    """Yields a problem if the search would ignore the strategies that are written."""
    mode = job.parallel.mode
    if mode == "recursive_programming" and job.parallel.operators:
        text = f"{mode} chooses every strategy and would ignore those of parallel.operators"
        text += "; sharding_propagation keeps them"
        yield Problem(MODE_KEY, text, quote(f"{MODE_KEY}=sharding_propagation"))
