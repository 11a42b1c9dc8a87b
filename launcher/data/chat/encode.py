"""Rows of conversations as the task of a process that encodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from launcher.data.chat.conversations import Row
from launcher.data.chat.tokenizer import ChatTokenizer, chat_tokenizer
from launcher.data.chat.tokens import ChatTokens, Counts, made
from launcher.data.files.bad_file import BadFile
from launcher.job.schema.components import Chat

ROWS = 256
"""Of a task."""
BYTES = 1 << 20
"""Of the lines of a task, unless one has more."""


@dataclass(frozen=True)
class LabelledRows:
    """What rows have become, or why they are refused; ``last`` is the last of them, without its data."""

    made: ChatTokens | None
    last: Row
    counts: Counts = field(default_factory=Counts)
    refused: str = ""


@dataclass(frozen=True)
class EncodeRows:
    """Answered with ``LabelledRows``."""

    settings: Chat
    rows: tuple[Row, ...]

    def answer(self) -> LabelledRows:
        counts, last = Counts(), replace(self.rows[-1], data=b"")
        try:
            found = made(self.settings, _tokenizer(self.settings), self.rows, counts)
        except BadFile as error:
            return LabelledRows(None, last, refused=str(error))
        return LabelledRows(found, last, counts)


@cache
def _tokenizer(settings: Chat) -> ChatTokenizer:
    return chat_tokenizer(settings)


def tasks(settings: Chat, rows: Iterable[Row]) -> Iterator[EncodeRows]:
    """All ``rows``, in order."""
    some: list[Row] = []
    size = 0
    for row in rows:
        some.append(row)
        size += len(row.data) if isinstance(row.data, bytes) else 0
        if len(some) == ROWS or size >= BYTES:
            yield EncodeRows(settings, tuple(some))
            some, size = [], 0
    if some:
        yield EncodeRows(settings, tuple(some))
