"""Shows a running sweep: a table that is redrawn on a terminal, otherwise one line per event."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from launcher.job.sweep_grid import Cell
from launcher.runtime.training.progress import Pace, short, span
from launcher.sweep.cell_process import CellResult
from launcher.sweep.results.rows import Row
from launcher.sweep.results.table import figure, lines

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

    def rows(self, rows: Mapping[Cell, Sequence[Row]]) -> None:
        if self._live is None:
            return
        text = "\n".join([*self._table(rows), f"  {self._count} cells are done"])
        self._live.update(Text(text), refresh=True)

    def _table(self, rows: Mapping[Cell, Sequence[Row]]) -> Iterator[str]:
        """Yields a table of the cells that run now."""
        last = [self._last(cell, found) for cell, found in rows.items()]
        heads = ("cell", "step", "loss", "tokens/s", "samples/s", "eta")
        if last:
            yield from lines({head: [row.get(head, "") for row in last] for head in heads})

    def _last(self, cell: Cell, rows: Sequence[Row]) -> dict[str, str]:
        row: Mapping[str, Any] = next((row for row in reversed(rows) if "loss" in row), {})
        told = {"cell": cell.name}
        if not row:
            return told
        left = self._paces[cell.name].left(row)
        told |= {"step": f"{row['step']}/{row['steps']}", "loss": figure(row["loss"])}
        told |= {name.replace("_per_", "/"): short(row[name]) for name in SPEEDS if name in row}
        return told | ({} if left is None else {"eta": span(left)})

    @property
    def _count(self) -> str:
        return f"[{self._ended}/{self._size}]" if self._size else f"[{self._ended}]"

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self._out, flush=True)
