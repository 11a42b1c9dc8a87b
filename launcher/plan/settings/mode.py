"""``parallel.mode``: who decides how the model is spread."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job

KEY = "parallel.mode"
LATER = "not available yet"


def refused(job: Job) -> Iterator[Problem]:
    """A mode that this version does not have; never accepted in silence."""
    mode = job.parallel.mode
    if mode != "semi_auto":
        yield Problem(KEY, f"{mode} is {LATER}", quote(f"{KEY}=semi_auto"))
