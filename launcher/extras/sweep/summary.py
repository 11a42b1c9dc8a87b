"""The summary of a sweep: table, CSV, console."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.loss_differences import Gap
from launcher.extras.sweep.metrics_rows import Row
from launcher.extras.sweep.ranking import ResultLine, Results
from launcher.extras.sweep.requests import MEASURED, CheckedCell
from launcher.job import sweep_grid
from launcher.job.sweep_grid import Cell
from launcher.runtime.training.progress import Pace, short, span

WIDTH = 100
LONGEST_TEXT = 24
"""The maximum number of characters in a table cell."""
DIGITS = 8
"""The maximum number of characters of a number that is not rounded."""


def lines(columns: Mapping[str, Sequence[str]], width: int = WIDTH) -> Iterator[str]:
    """Yields the lines of a table. ``columns`` by header, the most important first; empty ones are left out.

    >>> for line in lines({"cell": ["0", "1"], "lr": ["0.1", "0.01"], "none": ["", ""]}): print(line)
      cell  lr
      0     0.1
      1     0.01
    >>> for line in lines({"cell": ["0"], "metric": ["1.5"]}, width=8): print(line)
      cell
      0
    """
    shown: dict[str, list[str]] = {}
    used = 0
    for head, cells in columns.items():
        texts = [short_text(text) for text in (head, *cells)]
        wide = 2 + max(map(len, texts))
        if any(cells) and used + wide <= width:
            shown[head] = [f"{text:<{wide - 2}}" for text in texts]
            used += wide
    for row in zip(*shown.values(), strict=True):
        yield ("  " + "  ".join(row)).rstrip()


def figure(value: object) -> str:
    """Returns a value as tables show it.

    >>> figure(0.000123456), figure(12345.6), figure(3), figure(None)
    ('0.0001235', '12346', '3', '')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def short_text(text: str) -> str:
    """Returns a text, shortened to fit a table cell.

    >>> short_text("0.07963234721775597"), short_text("1f1b"), short_text("a_very_long_name_of_a_recipe")
    ('0.07963', '1f1b', 'a_very_long_name_of_a...')
    """
    if len(text) > DIGITS:
        with suppress(ValueError):
            return f"{float(text):.4g}"
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."


def number(name: str) -> str:
    """Returns the number of the cell with this ``name``."""
    return name.partition("-")[0]


CSV = "summary.csv"
MOST_LINES = 40
"""The maximum number of lines on the console; the file has all of them."""


def write_csv(folder: Path, results: Results, gaps: Mapping[str, Gap]) -> None:
    """Writes a row per cell, in the order of the sweep, with a column per setting and measurement."""
    rows = [dict(_columns(line, results, gaps.get(line.name))) for line in _ordered(results)]
    head = list(dict.fromkeys(key for row in rows for key in row if key not in ("seconds", "error")))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, [*head, "seconds", "error"], restval="")
    table.writeheader()
    table.writerows(rows)
    write_text(folder / CSV, text.getvalue())


def printed(results: Results, gaps: Mapping[str, Gap]) -> Iterator[str]:
    """Yields a table sorted by the metric, then why cells failed, and cells whose losses differ too much."""
    shown = results.lines[:MOST_LINES]
    columns: dict[str, list[str]] = {"cell": [number(line.name) for line in shown]}
    for key in _keys(results):
        columns[_last(key, _keys(results))] = [line.values.get(key, "") for line in shown]
    columns[results.metric] = [figure(line.value) for line in shown]
    columns["mean"], columns["spread"] = _repeats(shown, results)
    columns["status"] = [
        f"as {number(line.result.same_as)}" if line.result.same_as else line.result.status for line in shown
    ]
    columns["gap"] = [figure(gaps[line.name].early) if line.name in gaps else "" for line in shown]
    for name in MEASURED:
        if name != results.metric:
            columns[name] = [figure(line.result.metrics.get(name)) for line in shown]
    yield from lines(columns)
    if len(results.lines) > MOST_LINES:
        yield f"  and {len(results.lines) - MOST_LINES} more in {CSV}"
    for line in results.lines:
        if line.result.error and line.result.status not in ("done", "submitted", "written"):
            yield f"  {line.name}: {line.result.status}: {line.result.error}"
    for name, gap in gaps.items():
        if not gap.right:
            yield f"  {name}: losses differ from {gap.of} by {gap.early:.1e}, {gap.allowed:.0e} is allowed"


def planned(checked: Sequence[CheckedCell]) -> Iterator[str]:
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
    forecasts = [{} if one.forecast is None else one.forecast.columns for one in shown]
    for name in dict.fromkeys(name for row in forecasts for name in row):
        cells = [figure(row.get(name)) for row in forecasts]
        if name != "ranks" or len({*cells}) > 1:
            columns[name.removeprefix("planned_")] = cells
    yield from lines(columns)
    yield from reasons(checked)


def reasons(checked: Sequence[CheckedCell]) -> Iterator[str]:
    """Yields each reason why cells cannot run, once."""
    cells: dict[str, list[str]] = {}
    for one in checked:
        if one.refused:
            cells.setdefault(one.refused, []).append(number(one.cell.name))
    for why, numbers in cells.items():
        yield f"  cannot run: {why} ({'cell' if len(numbers) == 1 else 'cells'} {', '.join(numbers)})"


def _seconds(one: CheckedCell) -> float:
    seconds = None if one.forecast is None else one.forecast.seconds
    return inf if seconds is None else seconds


def _runs(one: CheckedCell, first: Mapping[str, str]) -> str:
    twin = one.cell.name if one.forecast is None else first[one.forecast.digest]
    return "yes" if twin == one.cell.name else f"as {number(twin)}"


def _columns(line: ResultLine, results: Results, gap: Gap | None) -> Iterator[tuple[str, Any]]:
    result = line.result
    yield "cell", line.name
    yield from line.values.items()
    mean, spread = results.groups.get(result.cell.varied, (None, None))
    if spread is not None:
        yield "repeat", result.cell.repeat
    yield "status", result.status
    if result.same_as:
        yield "same_as", result.same_as
    yield from result.metrics.items()
    if spread is not None:
        yield f"{results.metric}_mean", mean
        yield f"{results.metric}_spread", spread
    if line.forecast is not None:
        yield from line.forecast.columns.items()
    if gap is not None:
        yield "gap_early", gap.early
        yield "gap", gap.all_steps
    if line in results.front:
        yield "front", "yes"
    yield "seconds", round(result.seconds, 1)
    yield "error", result.error


def _ordered(results: Results) -> list[ResultLine]:
    return sorted(results.lines, key=lambda line: (int(number(line.name)), line.name))


def _keys(results: Results) -> list[str]:
    return list(dict.fromkeys(key for line in results.lines for key in line.values))


def _last(key: str, keys: Sequence[str]) -> str:
    """Returns the shortest suffix of ``key`` that no other key has.

    >>> _last("optim.lr", ["optim.lr", "model.dim"]), _last("a.b.x", ["a.b.x", "a.c.x"])
    ('lr', 'b.x')
    """
    parts = key.split(".")
    for n in range(1, len(parts)):
        short = ".".join(parts[-n:])
        if not any(other != key and f".{other}".endswith(f".{short}") for other in keys):
            return short
    return key


def _repeats(shown: Sequence[ResultLine], results: Results) -> tuple[list[str], list[str]]:
    """Returns means and standard deviations over seeds, shown only for the first run of each cell."""
    means, spreads = [], []
    for line in shown:
        mean, spread = results.groups.get(line.result.cell.varied, (None, None))
        first_run = spread is not None and line.result.cell.repeat == 0
        means.append(figure(mean) if first_run else "")
        spreads.append(figure(spread) if first_run else "")
    return means, spreads


SPEEDS = ("tokens_per_s", "samples_per_s")


class Watch:
    """The display of a running sweep. ``size``: the total number of cells, if it is known."""

    def __init__(self, size: int | None, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._size, self._ended = size, 0
        self._paces: dict[str, Pace] = {}
        console = Console(file=self._out, highlight=False)
        self._live = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def began(self, cell: Cell) -> None:
        self._paces[cell.name] = Pace(time.monotonic)
        if self._live is None:
            self._say(f"{cell.name}: running")

    def ended(self, result: CellResult, known: bool) -> None:
        self._ended += 1
        name = result.cell.name
        if result.same_as:
            self._say(f"{self._count} {name}: the same run as {result.same_as}")
        elif known:
            self._say(f"{self._count} {name}: already {result.status}")
        else:
            after = f" after {result.seconds:.1f} s" if result.seconds else ""
            why = f": {result.error}" if result.error else ""
            self._say(f"{self._count} {name}: {result.status}{after}{why}")

    def show_rows(self, rows: Mapping[Cell, Sequence[Row]]) -> None:
        if self._live is None:
            return
        text = "\n".join([*self._table(rows), f"  {self._count} cells are done"])
        self._live.update(Text(text), refresh=True)

    def _table(self, rows: Mapping[Cell, Sequence[Row]]) -> Iterator[str]:
        """Yields a table of the cells that run now."""
        last = [self._last(cell, cell_rows) for cell, cell_rows in rows.items()]
        heads = ("cell", "step", "loss", "tokens/s", "samples/s", "eta")
        if last:
            yield from lines({head: [row.get(head, "") for row in last] for head in heads})

    def _last(self, cell: Cell, rows: Sequence[Row]) -> dict[str, str]:
        row: Mapping[str, Any] = next((row for row in reversed(rows) if "loss" in row), {})
        texts = {"cell": cell.name}
        if not row:
            return texts
        seconds_left = self._paces[cell.name].seconds_left(row)
        texts |= {"step": f"{row['step']}/{row['steps']}", "loss": figure(row["loss"])}
        texts |= {name.replace("_per_", "/"): short(row[name]) for name in SPEEDS if name in row}
        return texts | ({} if seconds_left is None else {"eta": span(seconds_left)})

    @property
    def _count(self) -> str:
        return f"[{self._ended}/{self._size}]" if self._size else f"[{self._ended}]"

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self._out, flush=True)
