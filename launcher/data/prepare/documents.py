"""Reads a corpus block by block, and extracts the documents of each block, except bad ones."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from launcher.data.file_kinds import BadFile
from launcher.data.prepare.corpus_formats import LINES, CorpusFile, packing_errors, unpacked
from launcher.data.prepare.tables import LONGEST as LONGEST_TEXT
from launcher.data.prepare.tables import LongText, column_values

BLOCK = 1 << 20  # bytes
LONGEST_LINE = 8 << 20  # the most bytes of a line; it is decoded at once, to at most four bytes per character


@dataclass(frozen=True)
class Position:
    """A place in a corpus: in file ``file`` (from 0), after ``offset`` unpacked bytes and ``row`` rows.

    In text, ``row`` counts lines.
    """

    file: int = 0
    offset: int = 0
    row: int = 0


@dataclass(frozen=True)
class TextBlock:
    """A part of a corpus file: bytes of text, or the values of a column.

    It begins at ``start``; the next block begins at ``after``. ``ends`` says whether it is the last block of
    its file. ``bad`` is the reason if a line was left out because it is too long.
    """

    start: Position
    after: Position
    data: bytes | list[Any]
    ends: bool
    bad: str = ""

    @property
    def nbytes(self) -> int:
        return self.after.offset - self.start.offset


def blocks(files: Sequence[CorpusFile], at: Position, *, field: str, documents: str) -> Iterator[TextBlock]:
    """Yields the blocks from ``at`` to the end of the last file. Raises ``BadFile`` with the path.

    Args:
        files: The files of the corpus.
        at: Where to begin.
        field: The column of tables.
        documents: ``"line"`` if each line of a text file is a document.
    """
    for index in range(at.file, len(files)):
        file = files[index]
        start = at if index == at.file else Position(index)
        if file.form not in LINES:
            yield from _of_table(file, start, field)
            continue
        cut = _behind_line if file.form == "jsonl" or documents == "line" else text_split_point
        try:
            with unpacked(file) as stream:
                yield from _of_lines(stream, start, cut)
        except packing_errors() as error:
            raise BadFile(f"{file.path}: cannot be unpacked: {error}") from error
        except OSError as error:
            raise BadFile(f"{file.path}: cannot be read: {error.strerror or error}") from error


def text_split_point(data: bytes) -> int:
    """Returns where to split a long text so that a byte-level tokenizer sees the same words on both sides.

    The split is after a line that does not end in a space, before a letter or digit. If no line is like this,
    it is before any line or word, or else before a character; the tokens may then change there.
    """
    for mark in (_LETTER, _LINE, _WORD):
        at = _last(mark, data)
        if at:
            return at
    end = len(data)
    while end > 1 and end > len(data) - 4 and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if end > 1 and data[end - 1] >= 0xC0 else len(data)


def text_pieces(text: NDArray[np.uint8]) -> Iterator[bytes]:
    """Splits a text of any length into pieces of at most ``BLOCK`` bytes, as ``blocks`` splits a file."""
    at = 0
    while len(text) - at >= BLOCK:
        piece = text[at : at + BLOCK].tobytes()
        piece = piece[: text_split_point(piece)]
        yield piece
        at += len(piece)
    yield text[at:].tobytes()


_LETTER, _LINE, _WORD = (
    re.compile(p) for p in (rb"[!-~]\n(?=[A-Za-z0-9])", rb"\n(?=\S)", rb"(?<=\S)(?= \S)")
)


def _last(mark: re.Pattern[bytes], data: bytes) -> int:
    """Returns the end of the last match; 0 if nothing matches. It searches backwards."""
    size = 1 << 12
    while True:
        first = max(len(data) - size, 0)
        ends = [m.end() for m in mark.finditer(data, first)]
        if ends or not first:
            return ends[-1] if ends else 0
        size *= 8


def _behind_line(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _of_lines(stream: BinaryIO, start: Position, cut: Callable[[bytes], int]) -> Iterator[TextBlock]:
    """Yields the blocks of a text. The end of a block depends only on the bytes from its start on."""
    _skip(stream, start.offset)
    data, size_needed = b"", BLOCK
    while True:
        data += stream.read(size_needed - len(data))
        last = len(data) < size_needed
        if not data:
            return
        end = len(data) if last else cut(data)
        if not end and len(data) < LONGEST_LINE:
            size_needed += BLOCK
            continue
        if not end:
            size, last = _to_line_end(stream)
            after = replace(start, offset=start.offset + len(data) + size, row=start.row + 1)
            bad = f"a line of {len(data) + size} bytes; at most {LONGEST_LINE} are read"
            yield TextBlock(start, after, b"", last, bad)
            data = b""
        else:
            mine, data = data[:end], data[end:]
            after = replace(start, offset=start.offset + end, row=start.row + mine.count(b"\n"))
            yield TextBlock(start, after, mine, last)
        if last:
            return
        start, size_needed = after, BLOCK


def _to_line_end(stream: BinaryIO) -> tuple[int, bool]:
    """Skips to the end of the line; returns the number of bytes skipped, and whether the file ends there."""
    size = 0
    while line := stream.readline(BLOCK):
        size += len(line)
        if line.endswith(b"\n"):
            return size, False
    return size, True


def _skip(stream: BinaryIO, offset: int) -> None:
    if stream.seekable():
        stream.seek(offset)
        return
    while offset and (passed := len(stream.read(min(offset, BLOCK)))):
        offset -= passed


def _of_table(file: CorpusFile, start: Position, field: str) -> Iterator[TextBlock]:
    """Yields the blocks of a table. ``offset`` counts the bytes of the texts before a block, in UTF-8."""
    waiting: TextBlock | None = None
    for values in column_values(file, field, start.row):
        nbytes = sum(_utf8_size(v) for v in values if isinstance(v, str))
        after = replace(start, offset=start.offset + nbytes, row=start.row + len(values))
        if waiting is not None:
            yield waiting
        waiting = TextBlock(start, after, values, ends=False)
        start = after
    if waiting is not None:
        yield replace(waiting, ends=True)


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


Kind = Literal["jsonl", "lines", "text", "values"]
"""The content of a block: JSON lines, one document per line, a part of one document, or table values."""


@dataclass(frozen=True)
class Bad:
    """A row that is left out: its number in the block, from 0, and the reason."""

    row: int
    why: str


@dataclass(frozen=True)
class Documents:
    texts: list[str]
    bad: list[Bad]


def documents(kind: Kind, data: bytes | list[Any], field: str, first: bool) -> Documents:
    """Returns the non-empty documents of a block. ``first`` says whether it is the first of its file."""
    if isinstance(data, list):
        rows = [_of_value(value) for value in data]
    elif kind == "text":
        return _of_text(data.removeprefix(codecs.BOM_UTF8) if first else data)
    else:
        lines = (data.removeprefix(codecs.BOM_UTF8) if first else data).split(b"\n")
        read = _of_json if kind == "jsonl" else _of_line
        rows = [read(line, field) for line in lines]
    texts = [text for text in rows if isinstance(text, str) and text]
    return Documents(texts, [Bad(row, text.why) for row, text in enumerate(rows) if isinstance(text, _No)])


def keys_of_text(data: bytes) -> list[str]:
    """Returns the keys that have text in each of the first JSON objects of ``data``, one object per line."""
    objects = []
    for line in data.split(b"\n")[:_LOOKED]:
        with suppress(ValueError, RecursionError):
            objects.append(json.loads(line))
    each = [[k for k, v in o.items() if isinstance(v, str)] for o in objects if isinstance(o, dict)]
    return [key for key in each[0] if all(key in keys for keys in each)] if each else []


_LOOKED = 50


@dataclass(frozen=True)
class _No:
    why: str


def _of_text(data: bytes) -> Documents:
    """Decodes a part of one document, and leaves out the lines that are not UTF-8."""
    try:
        return Documents([data.decode()], [])
    except UnicodeDecodeError:
        read = [_decoded(line) for line in data.split(b"\n")]
    bad = [Bad(row, line.why) for row, line in enumerate(read) if isinstance(line, _No)]
    ends = ["\n"] * (len(read) - 1) + [""]
    good = [line + end for line, end in zip(read, ends, strict=True) if isinstance(line, str)]
    return Documents(["".join(good)], bad)


def _decoded(line: bytes, name: str = "line") -> str | _No:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return _No(f"byte {error.start} of the {name} is not UTF-8")


def _of_line(line: bytes, _: str) -> str | _No:
    return _decoded(line.removesuffix(b"\r"))


def _of_json(line: bytes, field: str) -> str | _No:
    if not line.strip():
        return ""
    text = _decoded(line)
    if isinstance(text, _No):
        return text
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        return _No(f"not JSON: {error.msg} at character {error.pos}")
    except (ValueError, RecursionError):
        return _No("not JSON within limits: too deep, or a number too long")
    if not isinstance(row, dict):
        return _No(f"{_NAMES.get(type(row), 'null')}, not an object")
    if field not in row:
        keys = ", ".join(map(str, list(row)[:_KEYS])) or "none"
        return _No(f"no key {field!r} (keys: {keys})")
    return _of_value(row[field], f"{field!r} is ")


_KEYS = 8
_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
}


def _of_value(value: Any, prefix: str = "") -> str | _No:
    if isinstance(value, bytes):
        return _decoded(value, "text")
    if isinstance(value, LongText):
        return _No(f"{prefix}a text of {value.nbytes} bytes; at most {LONGEST_TEXT} are read")
    if not isinstance(value, str):
        return _No(f"{prefix}{_NAMES.get(type(value), 'null')}, not text")
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        return _No("half a surrogate pair, which UTF-8 cannot encode")
    return value
