"""Writes the results of a sweep as ``summary.csv`` and as a table on the console."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.job import sweep_grid
from launcher.sweep.requests import Checked
from launcher.sweep.results.compare_losses import Gap
from launcher.sweep.results.ranking import Line, Results
from launcher.sweep.results.table import figure, lines, number
from launcher.sweep.settings import MEASURED

CSV = "summary.csv"
MOST = 40
"""The maximum number of lines on the console; the file has all of them."""


def write(folder: Path, found: Results, gaps: Mapping[str, Gap]) -> None:
    """Writes a row per cell, in the order of the sweep, with a column per setting and measurement."""
    rows = [dict(_columns(line, found, gaps.get(line.name))) for line in _ordered(found)]
    head = list(dict.fromkeys(key for row in rows for key in row if key not in ("seconds", "error")))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, [*head, "seconds", "error"], restval="")
    table.writeheader()
    table.writerows(rows)
    write_text(folder / CSV, text.getvalue())


def printed(found: Results, gaps: Mapping[str, Gap]) -> Iterator[str]:
    """Yields a table sorted by the metric, then why cells failed, and cells whose losses differ too much."""
    shown = found.lines[:MOST]
    columns: dict[str, list[str]] = {"cell": [number(line.name) for line in shown]}
    for key in _keys(found):
        columns[_last(key, _keys(found))] = [line.values.get(key, "") for line in shown]
    columns[found.metric] = [figure(line.value) for line in shown]
    columns["mean"], columns["spread"] = _repeats(shown, found)
    columns["status"] = [
        f"as {number(line.result.same_as)}" if line.result.same_as else line.result.status for line in shown
    ]
    columns["gap"] = [figure(gaps[line.name].early) if line.name in gaps else "" for line in shown]
    for name in MEASURED:
        if name != found.metric:
            columns[name] = [figure(line.result.metrics.get(name)) for line in shown]
    yield from lines(columns)
    if len(found.lines) > MOST:
        yield f"  and {len(found.lines) - MOST} more in {CSV}"
    for line in found.lines:
        if line.result.error and line.result.status not in ("done", "submitted", "written"):
            yield f"  {line.name}: {line.result.status}: {line.result.error}"
    for name, gap in gaps.items():
        if not gap.right:
            yield f"  {name}: not the numbers of {gap.of}: off by {gap.early:.1e}, {gap.allowed:.0e} allowed"


def planned(checked: Sequence[Checked]) -> Iterator[str]:
    """Yields a table of the forecast of each cell that can run, the fastest first, then why others cannot."""
    first: dict[str, str] = {}
    for one in checked:
        if one.forecast is not None:
            first.setdefault(one.forecast.digest, one.cell.name)
    shown = sorted((one for one in checked if not one.refused), key=_seconds)
    columns: dict[str, list[str]] = {"cell": [number(one.cell.name) for one in shown]}
    values = [sweep_grid.values(one.cell) for one in shown]
    keys = list(dict.fromkeys(key for row in values for key in row))
    for key in keys:
        columns[_last(key, keys)] = [row.get(key, "") for row in values]
    columns["runs"] = [_runs(one, first) for one in shown]
    told = [{} if one.forecast is None else one.forecast.columns for one in shown]
    for name in dict.fromkeys(name for row in told for name in row):
        cells = [figure(row.get(name)) for row in told]
        if name != "ranks" or len({*cells}) > 1:
            columns[name.removeprefix("planned_")] = cells
    yield from lines(columns)
    yield from reasons(checked)


def reasons(checked: Sequence[Checked]) -> Iterator[str]:
    """Yields each reason why cells cannot run, once."""
    found: dict[str, list[str]] = {}
    for one in checked:
        if one.refused:
            found.setdefault(one.refused, []).append(number(one.cell.name))
    for why, numbers in found.items():
        yield f"  cannot run: {why} ({'cell' if len(numbers) == 1 else 'cells'} {', '.join(numbers)})"


def _seconds(one: Checked) -> float:
    seconds = None if one.forecast is None else one.forecast.seconds
    return inf if seconds is None else seconds


def _runs(one: Checked, first: Mapping[str, str]) -> str:
    twin = one.cell.name if one.forecast is None else first[one.forecast.digest]
    return "yes" if twin == one.cell.name else f"as {number(twin)}"


def _columns(line: Line, found: Results, gap: Gap | None) -> Iterator[tuple[str, Any]]:
    result = line.result
    yield "cell", line.name
    yield from line.values.items()
    mean, spread = found.groups.get(result.cell.varied, (None, None))
    if spread is not None:
        yield "repeat", result.cell.repeat
    yield "status", result.status
    if result.same_as:
        yield "same_as", result.same_as
    yield from result.metrics.items()
    if spread is not None:
        yield f"{found.metric}_mean", mean
        yield f"{found.metric}_spread", spread
    if line.forecast is not None:
        yield from line.forecast.columns.items()
    if gap is not None:
        yield "gap_early", gap.early
        yield "gap", gap.whole
    if line in found.front:
        yield "front", "yes"
    yield "seconds", round(result.seconds, 1)
    yield "error", result.error


def _ordered(found: Results) -> list[Line]:
    return sorted(found.lines, key=lambda line: (int(number(line.name)), line.name))


def _keys(found: Results) -> list[str]:
    return list(dict.fromkeys(key for line in found.lines for key in line.values))


def _last(key: str, keys: Sequence[str]) -> str:
    """The shortest suffix of ``key`` that no other key has.

    >>> _last("optim.lr", ["optim.lr", "model.dim"]), _last("a.b.x", ["a.b.x", "a.c.x"])
    ('lr', 'b.x')
    """
    parts = key.split(".")
    for n in range(1, len(parts)):
        short = ".".join(parts[-n:])
        if not any(other != key and f".{other}".endswith(f".{short}") for other in keys):
            return short
    return key


def _repeats(shown: Sequence[Line], found: Results) -> tuple[list[str], list[str]]:
    """Means and standard deviations over seeds, shown only for the first run of each cell."""
    means, spreads = [], []
    for line in shown:
        mean, spread = found.groups.get(line.result.cell.varied, (None, None))
        told = spread is not None and line.result.cell.repeat == 0
        means.append(figure(mean) if told else "")
        spreads.append(figure(spread) if told else "")
    return means, spreads
