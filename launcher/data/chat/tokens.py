"""The labelled tokens of many conversations, concatenated; none is longer than a sample."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.data.chat.conversations import BadRow, Row, conversation, rows
from launcher.data.chat.tokenizer import ChatTokenizer, Labelled
from launcher.data.files.bad_file import BadFile
from launcher.job.schema.components import Chat, Paths

SKIP = "data.on_bad=skip leaves out what is bad, and counts it"
FIT = "data.too_long=cut leaves off their ends, skip leaves them out"


@dataclass
class Counts:
    """Counts what became of rows: ``bad`` and ``long`` are left out, ``cut`` ones lose their ends.

    ``why``: the reason for the first bad row.
    """

    conversations: int = 0
    bad: int = 0
    long: int = 0
    cut: int = 0
    why: str = ""

    def add(self, more: Counts) -> None:
        """Adds the counts of later rows."""
        self.conversations += more.conversations
        self.bad += more.bad
        self.long += more.long
        self.cut += more.cut
        self.why = self.why or more.why

    def text(self) -> str:
        """
        >>> Counts(12, bad=2, cut=1).text()
        '12 conversations, 1 cut, 2 bad rows left out'
        """
        more = [(self.cut, "cut"), (self.long, "too long and left out"), (self.bad, "bad rows left out")]
        first = f" (the first: {self.why})" if self.why else ""
        said = [f"{self.conversations} conversations", *(f"{n} {what}" for n, what in more if n)]
        return ", ".join(said) + first

    def check(self) -> None:
        """Raises ``BadFile`` if no conversation is left."""
        if not self.conversations:
            raise BadFile(f"nothing is left to train on: {self.text()}")


@dataclass(frozen=True)
class ChatTokens:
    """The ``tokens`` of all conversations, which of them are ``counted``, and where each one ``ends``."""

    tokens: NDArray[np.uint32]
    counted: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)


def labelled(settings: Chat, by: ChatTokenizer, some: Iterable[Row], counts: Counts) -> Iterator[Labelled]:
    """Yields the labelled tokens of each usable row, and counts the others. Raises ``BadFile``."""
    room = settings.seq_len + 1
    for row in some:
        try:
            ids, counted = by.labelled(conversation(row.data))
            if len(ids) > room:
                if settings.too_long == "error":
                    text = f"{len(ids)} tokens, and data.seq_len={settings.seq_len} has room for {room}"
                    raise BadFile(f"{row.place}: {text}; {FIT}")
                if settings.too_long == "skip" or not counted[1:room].any():
                    counts.long += 1
                    continue
                ids, counted = ids[:room], counted[:room]
                counts.cut += 1
            if not counted[1:].any():
                raise BadRow("the assistant says nothing in it")
        except BadRow as error:
            if settings.on_bad == "error":
                raise BadFile(f"{row.place}: {error}; {SKIP}") from error
            counts.bad += 1
            counts.why = counts.why or f"{row.place}: {error}"
            continue
        counts.conversations += 1
        yield ids, counted


def made(settings: Chat, by: ChatTokenizer, some: Iterable[Row], counts: Counts) -> ChatTokens:
    """Concatenates the conversations in ``some`` rows that are trained on. Raises ``BadFile``."""
    tokens, counted, ends = array("I"), bytearray(), array("q")
    for ids, mine in labelled(settings, by, some, counts):
        tokens.extend(ids.tolist())
        counted += mine.astype(np.uint8).tobytes()
        ends.append(len(tokens))
    return ChatTokens(
        np.frombuffer(tokens, np.uint32) if tokens else np.zeros(0, np.uint32),
        np.frombuffer(bytes(counted), np.uint8),
        np.frombuffer(ends, np.int64) if ends else np.zeros(0, np.int64),
    )


def in_memory(settings: Chat, by: ChatTokenizer, paths: Paths | None) -> ChatTokens:
    """Tokenizes all conversations into memory. Raises ``BadFile``."""
    counts = Counts()
    all_of_them = made(settings, by, rows(settings, paths), counts)
    counts.check()
    return all_of_them
