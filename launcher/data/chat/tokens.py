"""Tokenizes and labels conversations, cuts or skips those that are too long, and caches the tokens."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import jinja2
import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray

from launcher.data.chat.chat_tokenizer import (
    CONFIG,
    SPECIAL_TOKENS,
    TEMPLATE,
    ChatTokenizer,
    Labeled,
    chat_tokenizer,
)
from launcher.data.chat.conversation_files import BadRow, DataRow, conversation_of, files, read_rows
from launcher.data.chat.template import TemplateLimit
from launcher.data.file_kinds import BadFile
from launcher.data.prepare import lock, shard_record
from launcher.data.prepare.child_processes import confine, cores, encoders
from launcher.data.prepare.corpus_digest import content_digest
from launcher.data.prepare.documents import Position
from launcher.data.prepare.prepare import writing
from launcher.data.prepare.progress import Progress, ProgressReporter
from launcher.errors import RunError
from launcher.job.schema.data import Chat, Paths

SKIP = "data.on_bad=skip leaves out bad rows and counts them"
FIT = "data.too_long=cut truncates them, skip leaves them out"


def sample_takes(seq_len: int) -> str:
    """Returns the part of a message that says how many tokens a sample has at most."""
    return f"a sample takes at most {seq_len + 1} (data.seq_len={seq_len}, and one for the last target)"


@dataclass
class RowCounts:
    """Counts of rows: ``bad`` and ``long`` rows are left out, ``cut`` rows are truncated.

    ``why`` is the reason for the first bad row.
    """

    conversations: int = 0
    bad: int = 0
    long: int = 0
    cut: int = 0
    why: str = ""

    def add(self, more: RowCounts) -> None:
        """Adds the counts of later rows."""
        self.conversations += more.conversations
        self.bad += more.bad
        self.long += more.long
        self.cut += more.cut
        self.why = self.why or more.why

    def text(self) -> str:
        """Returns the counts as text; counts of 0 are left out.

        >>> RowCounts(12, bad=2, cut=1).text()
        '12 conversations, 1 cut, 2 bad rows left out'
        """
        more = [(self.cut, "cut"), (self.long, "too long and left out"), (self.bad, "bad rows left out")]
        first = f" (the first: {self.why})" if self.why else ""
        parts = [f"{self.conversations} conversations", *(f"{n} {label}" for n, label in more if n)]
        return ", ".join(parts) + first

    def check(self) -> None:
        """Raises ``BadFile`` if no conversation is left."""
        if not self.conversations:
            raise BadFile(f"nothing is left to train on: {self.text()}")


@dataclass(frozen=True)
class TokenizedConversations:
    """The ``tokens`` of all conversations, which of them are ``counted``, and where conversations end."""

    tokens: NDArray[np.uint32]
    counted: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)


def fitted(settings: Chat, made: Labeled) -> Labeled | None:
    """Cuts a conversation to the length of a sample; ``None`` if it is left out instead.

    That is so if ``data.too_long`` is skip, and if the cut leaves no token to train on.
    """
    ids, counted = made
    room = settings.seq_len + 1
    if len(ids) <= room:
        return made
    if settings.too_long == "skip" or not counted[1:room].any():
        return None
    return ids[:room], counted[:room]


def labeled(
    settings: Chat, by: ChatTokenizer, some: Iterable[DataRow], counts: RowCounts
) -> Iterator[Labeled]:
    """Yields the labeled tokens of each usable row, and counts the others. Raises ``BadFile``."""
    room = settings.seq_len + 1
    for row in some:
        try:
            ids, counted = by.labeled(conversation_of(row))
            if len(ids) > room:
                if settings.too_long == "error":
                    raise BadFile(f"{row.place}: {len(ids)} tokens; {sample_takes(settings.seq_len)}; {FIT}")
                short = fitted(settings, (ids, counted))
                if short is None:
                    counts.long += 1
                    continue
                ids, counted = short
                counts.cut += 1
            if not counted[1:].any():
                raise BadRow("it has no assistant tokens to train on")
        except BadRow as error:
            if isinstance(error, TemplateLimit):
                raise BadFile(f"{row.place}: {error}") from error
            if settings.on_bad == "error":
                raise BadFile(f"{row.place}: {error}; {SKIP}") from error
            counts.bad += 1
            counts.why = counts.why or f"{row.place}: {error}"
            continue
        counts.conversations += 1
        yield ids, counted


def concatenated(
    settings: Chat, by: ChatTokenizer, some: Iterable[DataRow], counts: RowCounts
) -> TokenizedConversations:
    """Concatenates the conversations of all usable rows in ``some``. Raises ``BadFile``."""
    tokens, counted, ends = array("I"), bytearray(), array("q")
    for ids, mine in labeled(settings, by, some, counts):
        tokens.extend(ids.tolist())
        counted += mine.astype(np.uint8).tobytes()
        ends.append(len(tokens))
    return TokenizedConversations(
        np.frombuffer(tokens, np.uint32) if tokens else np.zeros(0, np.uint32),
        np.frombuffer(bytes(counted), np.uint8),
        np.frombuffer(ends, np.int64) if ends else np.zeros(0, np.int64),
    )


def in_memory(settings: Chat, by: ChatTokenizer, paths: Paths | None) -> TokenizedConversations:
    """Tokenizes all conversations into memory. Raises ``BadFile``."""
    counts = RowCounts()
    all_of_them = concatenated(settings, by, read_rows(settings, paths), counts)
    counts.check()
    return all_of_them


ROWS = 256
"""The maximum number of rows in a task."""
BYTES = 1 << 20
"""The bytes of lines at which a task is full; the last line may exceed them."""


@dataclass(frozen=True)
class LabeledRows:
    """The tokens of the rows of a task, or the reason why a row was ``refused``.

    ``last`` is the last row, without its data.
    """

    made: TokenizedConversations | None
    last: DataRow
    counts: RowCounts = field(default_factory=RowCounts)
    refused: str = ""


def labeled_rows(settings: Chat, rows: tuple[DataRow, ...]) -> LabeledRows:
    """Tokenizes the rows of one task, in a child process."""
    counts, last = RowCounts(), replace(rows[-1], data=b"")
    try:
        tokens = concatenated(settings, _tokenizer(settings), rows, counts)
    except BadFile as error:
        return LabeledRows(None, last, refused=str(error))
    return LabeledRows(tokens, last, counts)


@cache
def _tokenizer(settings: Chat) -> ChatTokenizer:
    made = chat_tokenizer(settings, tried=True)
    confine()
    return made


def tasks(rows: Iterable[DataRow]) -> Iterator[tuple[DataRow, ...]]:
    """Groups ``rows`` into tasks, in order."""
    some: list[DataRow] = []
    size = 0
    for row in rows:
        some.append(row)
        size += row.nbytes
        if len(some) == ROWS or size >= BYTES:
            yield tuple(some)
            some, size = [], 0
    if some:
        yield tuple(some)


VERSION = 3
"""The version of the cached tokens' format."""
PARTS = {"train": "path", "val": "val"}
ARRAYS: dict[str, type[np.generic]] = {"tokens": np.uint32, "counted": np.uint8, "ends": np.int64}
"""The files of a part, and the types of their numbers."""


def make(settings: Chat, say: Callable[[str], None], speed: ProgressReporter) -> None:
    """Tokenizes the conversations, unless they are cached.

    Raises ``RunError`` for a file that cannot be read or written.
    """
    if settings.cache is None:
        return
    final = _folder(settings)
    if shard_record.published(final) is not None:
        return
    folder = shard_record.working_folder(final)
    with writing(folder), lock.locked(folder, say, "data.cache"):
        if shard_record.published(final) is not None:
            shard_record.remove_unused(folder)
            return
        shard_record.empty(folder)
        try:
            summary = _make(settings, folder, speed)
        except BadFile as error:
            raise RunError(f"data.path: {error}") from error
        say(f"data: {summary}, tokenized once into {final}")
        shard_record.publish(folder, final, {"version": VERSION, "conversations": summary})


def opened(settings: Chat) -> dict[str, TokenizedConversations] | None:
    """Returns the cached tokens of each part, mapped into memory; ``None`` if they are not cached."""
    if settings.cache is None or shard_record.published(folder := _folder(settings)) is None:
        return None
    return {
        part: TokenizedConversations(
            *(np.memmap(_file(folder, part, name), kind, "r") for name, kind in ARRAYS.items())
        )
        for part in PARTS
        if _file(folder, part, "ends").exists()
    }


def _make(settings: Chat, folder: Path, speed: ProgressReporter) -> str:
    """Tokenizes every part into ``folder``; returns a summary for people."""
    summaries = []
    label = partial(labeled_rows, settings)
    with encoders(cores(), settings.tokenizer_file) as crew:
        for part, field in PARTS.items():
            paths = getattr(settings, field)
            if part == "train" or paths is not None:
                speed.begin(files(paths), Progress())
                counts = _write(folder, part, crew.map(label, tasks(read_rows(settings, paths))), speed)
                summaries.append(counts.text() + (" held out" if part == "val" else ""))
    return "; ".join(summaries)


def _write(folder: Path, part: str, answers: Iterable[LabeledRows], speed: ProgressReporter) -> RowCounts:
    """Writes the answers of all processes in the order of the rows. Raises ``BadFile``."""
    counts, size, before, last = RowCounts(), 0, 0, DataRow("", b"")
    with ExitStack() as stack:
        out = {name: stack.enter_context(_file(folder, part, name).open("wb")) for name in ARRAYS}
        for answer in answers:
            if answer.made is None:
                raise BadFile(answer.refused)
            counts.add(answer.counts)
            out["tokens"].write(answer.made.tokens.tobytes())
            out["counted"].write(answer.made.counted.tobytes())
            out["ends"].write((answer.made.ends + size).tobytes())
            size += len(answer.made.tokens)
            before += last.offset if answer.last.file != last.file else 0
            last = answer.last
            at = Position(last.file, last.offset)
            speed(Progress(at, documents=counts.conversations, tokens=size, nbytes=before + last.offset))
    counts.check()
    return counts


def _file(folder: Path, part: str, name: str) -> Path:
    return folder / f"{part}-{name}.bin"


def _folder(settings: Chat) -> Path:
    """Returns the cache folder, whose name is a digest of everything that the tokens depend on.

    It reads the conversations and the tokenizer's files.
    """
    options = settings.model_dump(include={"seq_len", "too_long", "on_bad", "tokenizer"})
    val_files = [] if settings.val is None else files(settings.val)
    read = [content_digest(file.path) for file in (*files(settings.path), *val_files)]
    beside: list[Path] = [Path(settings.template)] if settings.template is not None else []
    if settings.tokenizer_file is not None:
        path = Path(settings.tokenizer_file)
        others = (path.with_name(name) for name in (CONFIG, TEMPLATE, SPECIAL_TOKENS))
        beside += [path, *(other for other in others if other.is_file())]
    read += [content_digest(path) for path in beside]
    made = [VERSION, tokenizers.__version__, jinja2.__version__, options, len(val_files), read]
    assert settings.cache is not None
    return Path(settings.cache) / xxhash.xxh3_128_hexdigest(json.dumps(made).encode())


def vocabulary(settings: Chat) -> int | None:
    """Returns the tokenizer's number of tokens; ``None`` if the tokenizer cannot be read."""
    try:
        return chat_tokenizer(settings).size
    except (ValueError, OSError):
        return None
