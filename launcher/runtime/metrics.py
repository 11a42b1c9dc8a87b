"""``metrics.jsonl``: one object a step."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Metrics:
    """Appends rows, each on the disk's side before the next step. NaN and infinities are written as ``null``.

    ``first_step`` is the step that will be written next: rows from there on, and a line torn by a kill, are cut off.
    So are they when a row comes again: a restarted attempt goes on from its checkpoint.
    ``table`` names a CSV of all rows, written on leaving the block.
    """

    def __init__(self, path: Path, first_step: int = 0, table: Path | None = None) -> None:
        if path.exists():
            os.truncate(path, _kept(path, (first_step, False)))
        self._path = path
        self._table = table
        self._file = path.open("a", encoding="utf-8")
        self._last = max((_place(row) for row in read(path)), default=(0, False))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._table is not None:
            write_csv(read(self._path), self._table)

    def write(self, row: Mapping[str, Any]) -> None:
        if (at := _place(row)) <= self._last:
            os.truncate(self._path, _kept(self._path, at))
        self._last = at
        self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
        self._file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole row."""
    return [row for _, row in _rows(path)]


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """A column for each key, in order of first appearance; empty where a row lacks it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)


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


def _place(row: Mapping[str, Any]) -> tuple[int, bool]:
    """Where a row belongs: the validation after a step comes behind the step's own row."""
    return row.get("step", -1), "loss" not in row


def _kept(path: Path, first: tuple[int, bool]) -> int:
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
