"""``save``: saves a checkpoint of the run, and deletes the oldest beyond ``checkpoint.keep``."""

from __future__ import annotations

from launcher.job.schema.job import Job
from launcher.job.schema.steps import Save
from launcher.runtime.training import save
from launcher.runtime.training.session import Session


def run_on_ranks(step: Save, session: Session, job: Job) -> str:
    return f"checkpoint {save.save(session, job.checkpoint.keep).name}, {session.world.size} ranks"
