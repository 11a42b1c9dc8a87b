"""``broadcast``: the first rank with each shard sends it to the shard's replicas."""

from __future__ import annotations

from launcher.job.schema.job import Job
from launcher.job.schema.steps import Broadcast
from launcher.plan.values.text import bytes_text, many
from launcher.runtime.training import checkpoint_tensors
from launcher.runtime.training.session import Session


def run_on_ranks(step: Broadcast, session: Session, job: Job) -> str:
    sent = checkpoint_tensors.broadcast(session)
    if not sent.collectives:
        return "no shard has replicas"
    return (
        f"sent {many(sent.tensors, 'tensor')} from the first rank of each to its replicas in "
        f"{many(sent.collectives, 'collective')}, {bytes_text(sent.nbytes)}; all digests agree"
    )
