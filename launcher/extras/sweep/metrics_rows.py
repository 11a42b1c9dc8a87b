"""Reads the metrics rows of a run, and takes from them what a sweep compares and tabulates."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from launcher.extras.sweep.requests import MEASURED
from launcher.untrusted.files import open_below

Reports = Sequence[tuple[int, float]]
"""The metric after some steps, as (step, value) in order."""
Row = Mapping[str, Any]
NAME = "metrics.jsonl"


class RowReader:
    """Reads a growing file; ``rows`` are those so far. A file that shrinks is read from its start."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._at = 0
        self.rows: list[Row] = []

    def read(self) -> Sequence[Row]:
        """Reads all complete lines. A step that was trained again replaces its old row and later rows."""
        if not (self._run / NAME).is_file():  # opening a pipe would wait for a writer
            return self.rows
        try:
            path = Path(self._run.name, NAME)
            with open(open_below(self._run.parent, path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
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
    """Returns the metric after each step or validation that reports it; null becomes NaN."""
    pairs = [(row["step"], row[metric]) for row in rows if metric in row]
    return [(step, float("nan") if value is None else float(value)) for step, value in pairs]


def measured(rows: Sequence[Row]) -> dict[str, float]:
    """Returns medians over all steps except the first, and the maximum memory of rank 0."""
    steps = [row for row in rows if "loss" in row]
    figures: dict[str, float] = {}
    for name in MEASURED:
        values = [row[name] for row in steps[1:] or steps if isinstance(row.get(name), int | float)]
        if values:
            figures[name] = max(values) if name == "memory_mb" else median(values)
    return figures
