"""JSON files as somebody else may have made them: none may block, be without end or say a thing twice."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from launcher.checkpoint.header import unique

LONGEST = 1 << 28  # bytes; the manifest of 10000 ranks with 400 tensors each is shorter


def read_bytes(path: Path, longest: int = LONGEST) -> bytes:
    """All of a file. Raises ``ValueError`` for a pipe or the like, and for more than ``longest`` bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer is open at once
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: not a file")
        if status.st_size > longest:
            raise ValueError(f"{path}: it has {status.st_size} bytes, at most {longest} are read")
        return file.read(status.st_size + 1)


def parsed(path: Path, data: bytes, what: str = "") -> Any:
    """What ``data``, read from ``path``, says. Raises ``ValueError`` for no JSON, and for a key that is listed twice.

    ``what`` says what it is then.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except _Twice as error:
        raise ValueError(f"{path}: {what}{error}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4300 digits
        raise ValueError(f"{path}: {what}no JSON") from error


class _Twice(Exception):
    """A key that is listed twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    try:
        return unique(pairs)
    except ValueError as error:
        raise _Twice(str(error)) from error
