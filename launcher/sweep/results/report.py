"""``report.html`` of a sweep: parallel coordinates, the best loss curves, and a table of cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.run.report.chart import chart
from launcher.run.report.page import REFRESH_S, STYLE
from launcher.sweep.results import parallel_coordinates
from launcher.sweep.results.ranking import Line, Results
from launcher.sweep.results.table import figure, number, short
from launcher.sweep.settings import MEASURED

NAME = "report.html"
CURVES = 6
"""The maximum number of curves in one chart, so that each has room for its name."""
MOST = 500
"""The maximum number of lines in the table."""


def write(folder: Path, found: Results, running: bool, files: Sequence[str] = ()) -> None:
    """Writes the page. ``files``: names in ``folder`` to link."""
    write_text(folder / NAME, page(folder.name, found, running, files))


def page(name: str, found: Results, running: bool, files: Sequence[str]) -> str:
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if running else ""
    state = "running" if running else "done"
    return "\n".join([
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}',
        f"<title>sweep {escape(name)}: {state}</title><style>{STYLE}</style></head><body>",
        f"<h1>sweep {escape(name)}</h1>",
        f'<p>{state} <span class="soft">{escape(_counts(found))}</span></p>',
        *_coordinates(found),
        *_curves(found),
        *_table(found),
        *_links(files),
        "</body></html>\n",
    ])  # fmt: skip


def _counts(found: Results) -> str:
    counts: dict[str, int] = {}
    for line in found.lines:
        counts[line.result.status] = counts.get(line.result.status, 0) + 1
    return ", ".join(f"{n} {status}" for status, n in counts.items())


def _ranked(found: Results) -> list[Line]:
    return [line for line in found.lines if line.value is not None]


def _coordinates(found: Results) -> Iterator[str]:
    """Yields parallel coordinates, if at least two cells can be compared."""
    lines = [line for line in _ranked(found) if line.values]
    keys = dict.fromkeys(key for line in lines for key in line.values)
    if len(lines) < 2 or not keys:
        return
    rows = [
        {key: line.values.get(key, "") for key in keys} | {found.metric: repr(line.value)} for line in lines
    ]
    ranks = [n / (len(lines) - 1) for n in range(len(lines))]
    titles = [f"{line.name}: {found.metric} {figure(line.value)}" for line in lines]
    yield f"<h2>What led to {escape(found.metric)}</h2>"
    yield f"<div>{parallel_coordinates.drawn(rows, titles, ranks)}</div>"


def _curves(found: Results) -> Iterator[str]:
    """Yields the loss curves of the best cells."""
    best = [line for line in found.lines if len(line.curve) and not line.result.same_as][:CURVES]
    if best:
        yield "<h2>Losses of the best</h2>"
        curves = {f"{number(line.name)}:": line.curve for line in best}
        yield f'<div style="max-width:800px">{chart("loss", curves)}</div>'


def _table(found: Results) -> Iterator[str]:
    keys = list(dict.fromkeys(key for line in found.lines for key in line.values))
    measured = [name for name in MEASURED if any(name in line.result.metrics for line in found.lines)]
    others = [name for name in measured if name != found.metric]
    heads = ["cell", *keys, found.metric, "mean", "spread", *others, "status"]
    rows = [_row(line, keys, others, found) for line in found.lines[:MOST]]
    kept = [i for i, _ in enumerate(heads) if any(row[i] for row in rows)]
    yield "<h2>Cells</h2><table><tr>"
    yield "".join(f'<th class="soft">{escape(heads[i])}</th>' for i in kept) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{row[i]}</td>" for i in kept) + "</tr>"
    yield "</table>"
    if len(found.lines) > MOST:
        yield f'<p class="soft">and {len(found.lines) - MOST} more</p>'


def _row(line: Line, keys: Sequence[str], others: Sequence[str], found: Results) -> list[str]:
    result = line.result
    mean, spread = found.groups.get(result.cell.varied, (None, None))
    page_of = quote(f"{result.same_as or line.name}/{NAME}")
    bad = "" if result.status in ("done", "pruned", "running") else ' class="bad"'
    why = f" as {result.same_as}" if result.same_as else f": {result.error}" if result.error else ""
    front = " &#9670;" if line in found.front else ""
    return [
        f'<a href="{page_of}">{escape(line.name)}</a>{front}',
        *(escape(short(line.values.get(key, ""))) for key in keys),
        figure(line.value),
        figure(mean) if spread is not None else "",
        figure(spread),
        *(figure(result.metrics.get(name)) for name in others),
        f"<span{bad}>{escape(result.status + why)}</span>",
    ]


def _links(files: Sequence[str]) -> Iterator[str]:
    if files:
        yield '<p class="soft">&#9670; no other cell is as good in metric, speed and memory</p>'
        links = (f'<a href="{quote(name)}">{escape(name)}</a>' for name in files)
        yield f"<h2>Files</h2><p>{' &middot; '.join(links)}</p>"
