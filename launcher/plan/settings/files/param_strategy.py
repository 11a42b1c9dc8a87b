"""``parallel.param_strategy``: files that parameter layouts are written to and read from."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema.job import Job
from launcher.plan.values.setting import Setting

KEY = "parallel.param_strategy"


def rows(job: Job) -> Iterator[Setting]:
    """Yields one row per file."""
    asked = job.parallel.param_strategy
    which = "trainable parameters" if asked.only_trainable else "all parameters and buffers"
    if asked.save is not None:
        why = f"layouts of {which} are written before the first step"
        yield Setting(f"{KEY}.save", asked.save, "applied", why)
    if asked.load is not None:
        why = f"{which} get the layouts of the file; operators, tp and shards follow where they are not given"
        yield Setting(f"{KEY}.load", asked.load, "applied", why)
