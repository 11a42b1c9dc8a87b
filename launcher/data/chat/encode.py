"""Encodes rows of conversations as tasks for worker processes."""

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
"""The maximum number of rows in a task."""
BYTES = 1 << 20
"""The bytes of lines at which a task is full; the last line may exceed them."""


@dataclass(frozen=True)
class LabelledRows:
    """The tokens made from rows, or why they are ``refused``.

    ``last``: the last row, without its data.
    """

    made: ChatTokens | None
    last: Row
    counts: Counts = field(default_factory=Counts)
    refused: str = ""


@dataclass(frozen=True)
class EncodeRows:
    """A task that is answered with ``LabelledRows``."""

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
    """Groups ``rows`` into tasks, in order."""
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
