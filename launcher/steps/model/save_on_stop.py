"""Saves a checkpoint before a run stops on request, so that no trained step is lost."""

from __future__ import annotations

from launcher.job.schema.job import Job
from launcher.runtime.training import save
from launcher.runtime.training.session import Session


def rescued(live: Session, job: Job, since: int) -> str | None:
    """Saves if steps were trained ``since`` the weights were loaded; returns the checkpoint's name."""
    return save.save(live, job.checkpoint.keep).name if live.step > since else None
