"""``parallel.operator_strategy``: files that operator strategies are written to and read from."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema.job import Job
from launcher.plan.values.setting import Setting

KEY = "parallel.operator_strategy"


def rows(job: Job) -> Iterator[Setting]:
    """Yields one row per file."""
    asked = job.parallel.operator_strategy
    if asked.save is not None:
        why = "strategies of the operators that are cut are written before the first step"
        yield Setting(f"{KEY}.save", asked.save, "applied", why)
    if asked.load is not None:
        why = "operators are cut as the file says, unless parallel.operators names the same module"
        yield Setting(f"{KEY}.load", asked.load, "applied", why)
