"""``parallel.group_file``: the file that groups of ranks are written to."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema.job import Job
from launcher.plan.values.setting import Setting

KEY = "parallel.group_file"


def rows(job: Job) -> Iterator[Setting]:
    path = job.parallel.group_file
    if path is not None:
        why = "which ranks share which group is written before the first step"
        yield Setting(KEY, path, "applied", why)
