"""What the rows of a cell's ``metrics.jsonl`` say, while it runs and after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from launcher.sweep.sampler import Reports
from launcher.sweep.settings import MEASURED

Row = Mapping[str, Any]
NAME = "metrics.jsonl"


class RowReader:
    """Of a file that grows: ``rows`` are those so far. One that shrinks was cut back, and is read anew."""

    def __init__(self, run: Path) -> None:
        self._path = run / NAME
        self._at = 0
        self.rows: list[Row] = []

    def read(self) -> Sequence[Row]:
        """All whole lines; a step that was trained again takes the place of what was told of it."""
        if not self._path.is_file():  # a pipe would wait for a writer
            return self.rows
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at, self.rows = 0, []
                file.seek(self._at)
                text = file.read()
        except OSError:
            return self.rows
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # cut back and grown again between two looks
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
    """The metric after each step, or each validation, that has it; what was no number is NaN."""
    found = [(row["step"], row[metric]) for row in rows if metric in row]
    return [(step, float("nan") if value is None else float(value)) for step, value in found]


def measured(rows: Sequence[Row]) -> dict[str, float]:
    """Medians over the steps behind the first, and the most memory of rank 0."""
    steps = [row for row in rows if "loss" in row]
    found: dict[str, float] = {}
    for name in MEASURED:
        values = [row[name] for row in steps[1:] or steps if isinstance(row.get(name), int | float)]
        if values:
            found[name] = max(values) if name == "memory_mb" else median(values)
    return found
