"""``deterministic``: whether repeated runs give bitwise equal results."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema.job import Job
from launcher.plan.values.setting import Setting


def rows(job: Job) -> Iterator[Setting]:
    if job.deterministic:
        yield Setting("deterministic", "true", "applied", "torch picks deterministic kernels or fails")
