"""What a sweep came to: ``summary.csv``, and a table of the same on the console."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.job.schema import redact
from launcher.sweep.cell_process import CellResult


def summarize(folder: Path, results: Sequence[CellResult]) -> None:
    """Every metric of every cell; how many are done, and how to run the others."""
    metrics = list(dict.fromkeys(k for r in results for k in r.metrics))
    head = ["cell", "overrides", "status", *metrics, "seconds", "error"]
    rows = [list(_row(r, metrics)) for r in results]

    table = io.StringIO(newline="")
    csv.writer(table).writerows([head, *rows])
    write_text(folder / "summary.csv", table.getvalue())
    _print_table(head, rows)

    failed = sum(r.status != "done" for r in results)
    again = f"; to run those again: -m sweep_dir={folder} and the same overrides" if failed else ""
    print(f"{len(results) - failed} of {len(results)} done, {folder / 'summary.csv'}{again}")


def _row(result: CellResult, metrics: Sequence[str]) -> Iterator[Any]:
    yield result.cell.name
    yield " ".join(redact.text(v) for v in result.cell.varied)
    yield result.status
    yield from (result.metrics.get(m, "") for m in metrics)
    yield round(result.seconds, 1)
    yield result.error


def _print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns that say something; a narrow terminal folds what does not fit, a file gets whole lines."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    shown = [i for i in range(len(head)) if any(row[i] != "" for row in rows)]
    table = Table(*(Column(head[i], overflow="fold") for i in shown), box=box.SIMPLE)
    for row in rows:
        table.add_row(*(Text(_cell_text(row[i])) for i in shown))

    console = Console()
    if not console.is_terminal:
        console.width = console.measure(table, options=console.options.update_width(10_000)).maximum
    console.print(table)


def _cell_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
