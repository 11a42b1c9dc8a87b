"""Tokens that stand for those of a corpus that is not prepared yet: what reads them can be checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launcher.data.prepare.tokenizer_file import vocabulary
from launcher.data.token_files.write import TokenWriter
from launcher.job.schema.steps import Prepare

UNKNOWN = 257
"""Different tokens, where the tokenizer cannot be read: its own check says why."""


def bound(settings: Prepare) -> int:
    """What every token will be below; of byte pairs that are still to be trained, at most."""
    return _bound_and_end(settings)[0]


def write(path: Path, settings: Prepare, count: int) -> None:
    """``count`` tokens, each of which ends a document."""
    size, end = _bound_and_end(settings)
    with TokenWriter(path, size, end) as file:
        file.append(np.full(count, end))


def _bound_and_end(settings: Prepare) -> tuple[int, int]:
    if settings.vocab_size is not None:
        return settings.vocab_size, settings.vocab_size - 1
    try:
        made = vocabulary(settings)
    except (ValueError, OSError):
        return UNKNOWN, UNKNOWN - 1
    return made.size, made.end
