"""Chooses the cells of a grid, and makes their rows."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.requests import MEASURED, CheckedCell

Reports = Sequence[tuple[int, float]]
"""The metric after some steps, as (step, value) in order."""


class Sampler(Protocol):
    """Call ``ask`` until the sampler is ``finished``, and ``tell`` it the result of each cell."""

    @property
    def finished(self) -> bool:
        """Whether there are no more cells."""

    @property
    def size(self) -> int | None:
        """The total number of cells, if it is known."""

    def ask(self) -> CheckedCell | None:
        """The next cell; ``None`` while it waits for results of others."""

    def tell(self, result: CellResult, reports: Reports) -> None:
        """Takes the result of a cell, once; it is not called for interrupted cells."""

    def hopeless(self, name: str, reports: Reports) -> str:
        """Why the cell ``name`` should be pruned; "" if it should not."""


class GridSampler:
    """The cells of a grid, in order."""

    def __init__(self, cells: Sequence[CheckedCell]) -> None:
        self._remaining = deque(cells)
        self.size = len(cells)

    @property
    def finished(self) -> bool:
        return not self._remaining

    def ask(self) -> CheckedCell | None:
        return self._remaining.popleft()

    def tell(self, result: CellResult, reports: Reports) -> None:
        """Ignores the result: a grid does not depend on it."""

    def hopeless(self, name: str, reports: Reports) -> str:
        return ""


Row = Mapping[str, Any]
NAME = "metrics.jsonl"


class RowReader:
    """Reads a growing file; ``rows`` are those so far. A file that shrinks is read from its start."""

    def __init__(self, run: Path) -> None:
        self._path = run / NAME
        self._at = 0
        self.rows: list[Row] = []

    def read(self) -> Sequence[Row]:
        """Reads all complete lines. A step that was trained again replaces the old rows from it on."""
        if not self._path.is_file():  # opening a pipe would wait for a writer
            return self.rows
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at, self.rows = 0, []
                file.seek(self._at)
                text = file.read()
        except OSError:
            return self.rows
        complete = text[: text.rfind(b"\n") + 1]
        self._at += len(complete)
        for line in complete.splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # truncated and grown again between two reads
                self._at, self.rows = 0, []
                break
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                self._add(row)
        return self.rows

    def _add(self, row: Row) -> None:
        if "loss" in row and self.rows and row["step"] <= self.rows[-1]["step"]:
            self.rows = [old for old in self.rows if old["step"] < row["step"]]
        self.rows.append(row)


def reports(rows: Sequence[Row], metric: str) -> Reports:
    """The metric after each step or validation that has it; null becomes NaN."""
    pairs = [(row["step"], row[metric]) for row in rows if metric in row]
    return [(step, float("nan") if value is None else float(value)) for step, value in pairs]


def measured(rows: Sequence[Row]) -> dict[str, float]:
    """Medians over all steps except the first, and the maximum memory of rank 0."""
    steps = [row for row in rows if "loss" in row]
    figures: dict[str, float] = {}
    for name in MEASURED:
        values = [row[name] for row in steps[1:] or steps if isinstance(row.get(name), int | float)]
        if values:
            figures[name] = max(values) if name == "memory_mb" else median(values)
    return figures
