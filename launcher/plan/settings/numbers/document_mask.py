"""``data.document_mask``: documents that share a window, and are as if each were alone."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.components import Tokens
from launcher.job.schema.job import Job
from launcher.job.schema.objectives import CrossEntropy
from launcher.plan.values.facts import IGNORED
from launcher.plan.values.setting import Setting

KEY = "data.document_mask"
PIECES, IGNORE = "parallel.pipeline.seq_chunks", "loss.ignore_index"


def refused(job: Job) -> Iterator[Problem]:
    """What cannot keep documents apart, or counts targets that are of none."""
    if not asked(job):
        return
    pieces = job.parallel.pipeline.seq_chunks
    if isinstance(pieces, int) and pieces > 1:
        text = f"{pieces}: positions restart and attention ends inside of a piece with {KEY}=true"
        cure = f"{PIECES}=1 parallel.pipeline.scheduler=1f1b"
        yield Problem(PIECES, f"{text}, which pieces of a sequence do not carry over; use whole ones", cure)
    if isinstance(job.loss, CrossEntropy) and job.loss.ignore_index != IGNORED:
        text = f"{job.loss.ignore_index}: with {KEY}=true targets of another document are {IGNORED}"
        yield Problem(IGNORE, f"{text}, and have to count for nothing", f"{IGNORE}={IGNORED}")


def asked(job: Job) -> bool:
    return isinstance(job.data, Tokens) and job.data.document_mask


def rows(job: Job) -> Iterator[Setting]:
    if asked(job):
        why = "attention within documents, positions restart; a token that ends one has no target"
        yield Setting(KEY, "true", "applied", why)
