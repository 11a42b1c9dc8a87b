"""``data.document_mask`` and ``data.packing``: how documents fill windows, and are kept apart there."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.components import Chat, Tokens, apart
from launcher.job.schema.job import Job
from launcher.job.schema.objectives import CrossEntropy
from launcher.plan.values.facts import IGNORED
from launcher.plan.values.setting import Setting

MASK, PACKING = "data.document_mask", "data.packing"
PIECES, IGNORE = "parallel.pipeline.seq_chunks", "loss.ignore_index"
WHY = {
    "best_fit": "documents whole in a window, several where they fit, and padding, which has no target",
    "single": "one document a window, and padding, which has no target",
}

CHATS = "conversations whole in a sample, several where they fit, each as if it were alone, and padding"


def refused(job: Job) -> Iterator[Problem]:
    """Yields problems for settings that cannot keep documents apart, or that count targets of padding."""
    data, documents, pieces = job.data, apart(job.data), job.parallel.pipeline.seq_chunks
    said = None if documents is None else f"{documents.key}={documents.value}"
    if said is not None and isinstance(pieces, int) and pieces > 1:
        text = f"{pieces}: positions restart and attention ends inside of a piece with {said}"
        cure = f"{PIECES}=1 parallel.pipeline.scheduler=1f1b"
        yield Problem(PIECES, f"{text}, which pieces of a sequence do not carry over; use whole ones", cure)
    if isinstance(data, Chat):
        yield from _ignored(job, "data=chat")
    elif isinstance(data, Tokens) and data.by_document:
        yield from _ignored(job, said or f"{PACKING}={data.packing}")


def _ignored(job: Job, asked: str) -> Iterator[Problem]:
    """Yields a problem if the loss does not ignore the number that marks targets of padding."""
    if isinstance(job.loss, CrossEntropy) and job.loss.ignore_index != IGNORED:
        text = f"{job.loss.ignore_index}: with {asked} there are targets of {IGNORED}"
        yield Problem(IGNORE, f"{text}, which have to count for nothing", f"{IGNORE}={IGNORED}")


def rows(job: Job) -> Iterator[Setting]:
    data = job.data
    if isinstance(data, Chat) and data.packing != "single":
        yield Setting(PACKING, data.packing, "applied", CHATS)
    if not isinstance(data, Tokens):
        return
    if data.packing != "windows":
        yield Setting(PACKING, data.packing, "applied", WHY[data.packing])
    if data.document_mask:
        why = "attention within documents, positions restart; a token that ends one has no target"
        yield Setting(MASK, "true", "applied", why)
