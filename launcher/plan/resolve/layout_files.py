"""Files of strategies and layouts, and what the plan says about them."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema.job import Job
from launcher.plan.values.setting import Setting

GROUP_FILE = "parallel.group_file"


def rows(job: Job) -> Iterator[Setting]:
    """Yields one row per file."""
    yield from _param_strategy(job)
    yield from _operator_strategy(job)
    yield from _group_file(job)


def _group_file(job: Job) -> Iterator[Setting]:
    """Yields the setting if a file is requested."""
    path = job.parallel.group_file
    if path is not None:
        why = "the ranks of each group are written before the first step"
        yield Setting(GROUP_FILE, path, "applied", why)


OPERATOR_STRATEGY = "parallel.operator_strategy"


def _operator_strategy(job: Job) -> Iterator[Setting]:
    """Yields one row per file."""
    files = job.parallel.operator_strategy
    if files.save is not None:
        why = "strategies of the operators that are cut are written before the first step"
        yield Setting(f"{OPERATOR_STRATEGY}.save", files.save, "applied", why)
    if files.load is not None:
        why = "operators are cut as the file says, unless parallel.operators names the same module"
        yield Setting(f"{OPERATOR_STRATEGY}.load", files.load, "applied", why)


PARAM_STRATEGY = "parallel.param_strategy"


def _param_strategy(job: Job) -> Iterator[Setting]:
    """Yields one row per file."""
    files = job.parallel.param_strategy
    which = "trainable parameters" if files.only_trainable else "all parameters and buffers"
    if files.save is not None:
        why = f"layouts of {which} are written before the first step"
        yield Setting(f"{PARAM_STRATEGY}.save", files.save, "applied", why)
    if files.load is not None:
        why = f"{which} get the layouts of the file; operators, tp and shards that are not set follow from it"
        yield Setting(f"{PARAM_STRATEGY}.load", files.load, "applied", why)
