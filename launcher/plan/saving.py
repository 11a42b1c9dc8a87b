"""How checkpoints of a run are written."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema import Job
from launcher.plan.setting import Setting, Status


def resolve(job: Job) -> Iterator[Setting]:
    """Those that are not at their default."""
    if job.checkpoint.asynchronous:
        yield Setting("checkpoint.async", "true", *_asynchronous(job))


def _asynchronous(job: Job) -> tuple[Status, str]:
    if job.checkpoint.every is None or not any(step.kind == "train" for step in job.steps.values()):
        return "satisfied", "nothing is saved while training"
    return "applied", "a thread writes a copy in host memory; training stands still for the copy alone"
