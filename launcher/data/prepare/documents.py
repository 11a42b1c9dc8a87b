"""Extracts the documents of a block, and reports its rows that are not documents."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["jsonl", "lines", "text", "values"]
"""JSON lines, one document per line, part of one document, or a column of a table."""


@dataclass(frozen=True)
class Bad:
    """A ``row`` of the block, from 0, that is left out, and the reason."""

    row: int
    why: str


@dataclass(frozen=True)
class Documents:
    texts: list[str]
    bad: list[Bad]


def documents(kind: Kind, data: bytes | list[Any], field: str, first: bool) -> Documents:
    """The non-empty documents of a block. ``first``: the block is the first of its file."""
    if isinstance(data, list):
        found = [_of_value(value) for value in data]
    elif kind == "text":
        return _of_text(data.removeprefix(codecs.BOM_UTF8) if first else data)
    else:
        lines = (data.removeprefix(codecs.BOM_UTF8) if first else data).split(b"\n")
        read = _of_json if kind == "jsonl" else _of_line
        found = [read(line, field) for line in lines]
    texts = [text for text in found if isinstance(text, str) and text]
    return Documents(texts, [Bad(row, text.why) for row, text in enumerate(found) if isinstance(text, _No)])


@dataclass(frozen=True)
class _No:
    why: str


def _of_text(data: bytes) -> Documents:
    """Decodes one text, without the lines that are not UTF-8."""
    try:
        return Documents([data.decode()], [])
    except UnicodeDecodeError:
        read = [_decoded(line) for line in data.split(b"\n")]
    bad = [Bad(row, line.why) for row, line in enumerate(read) if isinstance(line, _No)]
    ends = ["\n"] * (len(read) - 1) + [""]
    good = [line + end for line, end in zip(read, ends, strict=True) if isinstance(line, str)]
    return Documents(["".join(good)], bad)


def _decoded(line: bytes) -> str | _No:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return _No(f"byte {error.start} of the line is not UTF-8")


def _of_line(line: bytes, _: str) -> str | _No:
    return _decoded(line.removesuffix(b"\r"))


def _of_json(line: bytes, field: str) -> str | _No:
    if not line.strip():
        return ""
    text = _decoded(line)
    if isinstance(text, _No):
        return text
    try:
        said = json.loads(text)
    except json.JSONDecodeError as error:
        return _No(f"no JSON: {error.msg} at character {error.pos}")
    except (ValueError, RecursionError):
        return _No("no JSON that is read: too deep, or a number too long")
    if not isinstance(said, dict):
        return _No(f"{_NAMES.get(type(said), 'null')}, not an object")
    if field not in said:
        keys = ", ".join(map(str, list(said)[:_KEYS])) or "none"
        return _No(f"no key {field!r} (keys: {keys})")
    return _of_value(said[field], f"{field!r} is ")


_KEYS = 8
_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
}


def _of_value(value: Any, what: str = "") -> str | _No:
    if not isinstance(value, str):
        return _No(f"{what}{_NAMES.get(type(value), 'null')}, not text")
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        return _No("half a surrogate pair, which no UTF-8 can have")
    return value
