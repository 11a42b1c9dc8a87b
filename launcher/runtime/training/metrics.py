"""``metrics.jsonl``: one object a step, never torn, cut back when a run resumes."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from launcher.checkpoint.tensorfile.disk_space import BLOCK, Unwritten, told
from launcher.checkpoint.tensorfile.durable import write_text
from launcher.plan.settings.checkpoint import AVERAGED
from launcher.untrusted.links import open_below

_log = logging.getLogger(__name__)

Place = tuple[int, bool, int]


class Metrics:
    """Appends rows, each on the disk's side before the next step. NaN and infinities are written as ``null``.

    ``first_step`` is the step that will be written next: rows from there on, and a line torn by a kill, are
    cut off. So are they when a row comes again: a restarted attempt goes on from its checkpoint. ``table``
    names a CSV of all rows, written on leaving the block. ``patient``: on a full disk rows wait in memory for
    room, until the block is left; else ``Unwritten`` comes at once.
    """

    def __init__(
        self, path: Path, first_step: int = 0, table: Path | None = None, patient: bool = False
    ) -> None:
        self._path = path
        self._table = table
        self._patient = patient
        with told(path, BLOCK):
            self._fd = open_below(path.parent, path.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.ftruncate(self._fd, _kept(path, (first_step, False, 0)))
        self._last = max((_place(row) for row in read(path)), default=(0, False, 0))
        self._waiting = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._flush()
            if self._table is not None:
                write_csv(read(self._path), self._table)
        except Unwritten as full:
            if error is None:
                raise
            _log.warning("%s", full)
        finally:
            os.close(self._fd)

    def write(self, row: Mapping[str, Any]) -> None:
        # a step that is trained again replaces what was told of it
        at = _place(row)
        if at <= self._last:
            self._flush()
            os.ftruncate(self._fd, _kept(self._path, at))
        self._last = at

        # a full disk gets the rows that wait when it has room
        waited = bool(self._waiting)
        self._waiting += json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        try:
            self._flush()
        except Unwritten as full:
            if not self._patient:
                self._waiting.clear()
                raise
            if not waited:
                _log.warning("%s; rows wait in memory until there is room", full)

    def _flush(self) -> None:
        """All that waits, or none of it."""
        end = os.fstat(self._fd).st_size
        try:
            with told(self._path, len(self._waiting)):
                rest = memoryview(bytes(self._waiting))
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self._waiting.clear()


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole row."""
    return [row for _, row in _rows(path)]


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """A column for each key, in order of first appearance; empty where a row lacks it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns)
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Each row and where its line ends, up to the first line that is not whole."""
    rows, end = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        row = _parsed(line)
        if row is None:
            break
        end += len(line)
        rows.append((end, row))
    return rows


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:  # zeros, where the file grew but the disk never got the data
        return None
    return row if isinstance(row, dict) else None


def _place(row: Mapping[str, Any]) -> Place:
    """Where a row belongs: the validation after a step comes behind the step's own row.

    That of the moving average of its weights comes behind that of the weights; that of an older checkpoint
    where training was when it was loaded.
    """
    last = 2 * ("after" in row) + (f"val_loss{AVERAGED}" in row)
    return row.get("after", row.get("step", -1)), "loss" not in row, last


def _kept(path: Path, first: Place) -> int:
    """Bytes of the rows before the place ``first``."""
    end = 0
    for at, row in _rows(path):
        if _place(row) >= first:
            break
        end = at
    return end


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
