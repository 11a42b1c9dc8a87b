"""``data.packing`` and ``data.document_mask``: documents that are packed into samples."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.data import Chat, Tokens, apart
from launcher.job.schema.job import Job
from launcher.job.schema.objective import CrossEntropy
from launcher.plan.values.class_dims import IGNORED
from launcher.plan.values.setting import Setting

MASK, PACKING = "data.document_mask", "data.packing"
PIECES, IGNORE = "parallel.pipeline.seq_chunks", "loss.ignore_index"
WHY = {
    "best_fit": "full documents, several in a window if they fit; padding has no target",
    "single": "one document per window; padding has no target",
}
CHATS = "full conversations, several in a sample if they fit, each kept separate; the rest is padding"


def problems(job: Job) -> Iterator[Problem]:
    """Yields problems for settings that cannot keep documents separate, or that count targets of padding."""
    data, documents, pieces = job.data, apart(job.data), job.parallel.pipeline.seq_chunks
    setting = None if documents is None else f"{documents.key}={documents.value}"
    if setting is not None and isinstance(pieces, int) and pieces > 1:
        text = f"{pieces}: {setting} restarts positions and ends attention inside a piece of a sequence"
        cure = f"{PIECES}=1 parallel.pipeline.scheduler=1f1b"
        yield Problem(PIECES, f"{text}, which sequence chunks do not support; use full sequences", cure)
    if isinstance(data, Chat):
        yield from _ignored(job, "data=chat")
    elif isinstance(data, Tokens) and data.by_document:
        yield from _ignored(job, setting or f"{PACKING}={data.packing}")


def _ignored(job: Job, setting: str) -> Iterator[Problem]:
    """Yields a problem if the loss does not ignore the number that marks targets of padding."""
    if isinstance(job.loss, CrossEntropy) and job.loss.ignore_index != IGNORED:
        text = f"{job.loss.ignore_index}: with {setting} there are targets of {IGNORED}"
        yield Problem(IGNORE, f"{text}, which must be ignored", f"{IGNORE}={IGNORED}")


def rows(job: Job) -> Iterator[Setting]:
    """Yields the settings that are not at their default."""
    data = job.data
    if isinstance(data, Chat) and data.packing != "single":
        yield Setting(PACKING, data.packing, "applied", CHATS)
    if not isinstance(data, Tokens):
        return
    if data.packing != "windows":
        yield Setting(PACKING, data.packing, "applied", WHY[data.packing])
    if data.document_mask:
        why = "attention stays within documents and positions restart"
        why += "; the last token of a document has no target"
        yield Setting(MASK, "true", "applied", why)
