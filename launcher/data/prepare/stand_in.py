"""Placeholder tokens for a corpus that is not prepared yet, so that their readers can be checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launcher.data.prepare.tokenizer_file import vocabulary
from launcher.data.token_files.write import TokenWriter
from launcher.job.schema.steps import Prepare

UNKNOWN = 257
"""The vocabulary size if the tokenizer cannot be read; its own check reports why."""


def bound(settings: Prepare) -> int:
    """A bound that every token is below. For BPE that is not trained yet, the upper limit."""
    return _bound_and_end(settings)[0]


def write(path: Path, settings: Prepare, count: int) -> None:
    """Writes ``count`` tokens, each of which ends a document."""
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
