"""How checkpoints of a run are written."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema import Job
from launcher.plan.setting import Setting, Status

PLACE = re.compile(r"(env):([A-Za-z_][A-Za-z0-9_]*)|(file):(.+)")
"""Where a key is: an environment variable, or a file."""


def resolve(job: Job) -> Iterator[Setting]:
    """Those that are not at their default."""
    if job.checkpoint.asynchronous:
        yield Setting("checkpoint.async", "true", *_asynchronous(job))

    if (place := job.checkpoint.encrypt) is not None:
        why = "tensor files are sealed with AES-256-GCM; names, shapes and digests of tensors stay readable"
        yield Setting("checkpoint.encrypt", place, "applied", why)


def refused(job: Job) -> Iterator[Problem]:
    """A key in the place of where the key is; it is not shown."""
    if job.checkpoint.encrypt is not None and not PLACE.fullmatch(job.checkpoint.encrypt):
        text = "this does not say where the key is; a key itself belongs into no configuration"
        yield Problem("checkpoint.encrypt", text, "checkpoint.encrypt=env:CHECKPOINT_KEY")


def _asynchronous(job: Job) -> tuple[Status, str]:
    if job.checkpoint.every is None or not any(step.kind == "train" for step in job.steps.values()):
        return "satisfied", "nothing is saved while training"
    return "applied", "a thread writes a copy in host memory; training stands still for the copy alone"
