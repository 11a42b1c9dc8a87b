"""``sync_shared``: makes parameters that stages share equal on all of them."""

from __future__ import annotations

from launcher.job.schema.job import Job
from launcher.job.schema.steps import SyncShared
from launcher.runtime.training.session import Session


def run_on_ranks(step: SyncShared, session: Session, job: Job) -> str:
    for tied in session.model.ties:
        tied.sync()
    count = len(session.plan.ties)
    if not count:
        return "no parameters are tied"
    return f"{count} tied parameter{'s' if count > 1 else ''} made equal on all stages"
