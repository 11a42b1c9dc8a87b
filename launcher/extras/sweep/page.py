"""The HTML page of a sweep: parallel coordinates, loss curves and the table of cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isfinite, log10
from pathlib import Path
from urllib.parse import quote

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.extras.sweep.ranking import ResultLine, Results
from launcher.extras.sweep.requests import MEASURED
from launcher.extras.sweep.summary import figure, number, short_text
from launcher.optional import charts, run_page

WIDE, HIGH = 1120, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 90, 40, 30
CHART_STYLE = "text{font-family:sans-serif;font-size:11px;fill:#57606a}.head{font-weight:600;fill:#24292f}"
BEST, WORST = (44, 111, 187), (208, 215, 222)
LOG = 20.0
"""An axis is logarithmic if its largest value is at least this many times the smallest."""
APART = 12
"""The minimum distance of two labels of an axis, in pixels."""


class _Axis:
    """Maps values to heights from 0 to 1: numbers by their size, words in sorted order."""

    def __init__(self, values: Sequence[str]) -> None:
        numbers = [_number(v) for v in values]
        self._numeric = None not in numbers
        if self._numeric:
            sorted_numbers = sorted({n for n in numbers if n is not None})
            self._log = sorted_numbers[0] > 0 and sorted_numbers[-1] / sorted_numbers[0] >= LOG
            self.words = sorted({*values}, key=float)
            low, high = self._scaled(sorted_numbers[0]), self._scaled(sorted_numbers[-1])
            self._low, self._span = low, high - low
        else:
            self.words = sorted({*values})

    def _scaled(self, value: float) -> float:
        return log10(value) if self._log else value

    def at(self, value: str) -> float:
        if not self._numeric:
            return self.words.index(value) / max(len(self.words) - 1, 1) if len(self.words) > 1 else 0.5
        return (self._scaled(float(value)) - self._low) / self._span if self._span else 0.5

    @property
    def marks(self) -> Iterator[str]:
        """Yields the labels of the axis that do not overlap the one before."""
        last = -1.0
        for word in sorted(self.words, key=self.at):
            if self.at(word) - last >= APART / (HIGH - TOP - BOTTOM):
                last = self.at(word)
                yield word


def drawn(rows: Sequence[Mapping[str, str]], titles: Sequence[str], ranks: Sequence[float]) -> str:
    """Returns an SVG of ``rows``, one per cell, with the same keys; ``ranks``: from 0 for the best cell to 1.

    ``titles``: the tooltip of each cell's line.
    """
    keys = list(rows[0])
    axes = {key: _Axis([row[key] for row in rows]) for key in keys}
    across, height = (WIDE - LEFT - RIGHT) / max(len(keys) - 1, 1), HIGH - TOP - BOTTOM

    def y(key: str, value: str) -> float:
        return TOP + height * (1 - axes[key].at(value))

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" role="img">',
        f"<title>Settings and results</title><style>{CHART_STYLE}</style>",
    ]
    worst_first = sorted(range(len(rows)), key=lambda n: -ranks[n])
    for n in worst_first:
        points = "L".join(f"{LEFT + i * across:.1f} {y(key, rows[n][key]):.1f}" for i, key in enumerate(keys))
        wide = 2.5 if ranks[n] == 0 else 1.2
        line = f'<path d="M{points}" fill="none" stroke="{_color(ranks[n])}" stroke-width="{wide}">'
        out.append(f"{line}<title>{escape(titles[n])}</title></path>")
    for i, key in enumerate(keys):
        x = LEFT + i * across
        out.append(f'<path d="M{x:.1f} {TOP}v{height}" stroke="#24292f"/>')
        out.append(f'<text class="head" x="{x:.1f}" y="{TOP - 14}" text-anchor="middle">{escape(key)}</text>')
        for word in axes[key].marks:
            text = escape(short_text(word))
            out.append(f'<text x="{x + 5:.1f}" y="{y(key, word) + 4:.1f}">{text}</text>')
    return "".join([*out, "</svg>"])


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def _color(rank: float) -> str:
    mixed = (round(b + (w - b) * rank) for b, w in zip(BEST, WORST, strict=True))
    return f"rgb({','.join(map(str, mixed))})"


REPORT_FILE = "report.html"
CURVES = 6
"""The maximum number of curves in one chart, so that each has room for its name."""
MOST_LINES = 500
"""The maximum number of lines in the table."""


def write(folder: Path, results: Results, running: bool, files: Sequence[str] = ()) -> None:
    """Writes the page. ``files``: names in ``folder`` to link."""
    write_text(folder / REPORT_FILE, page(folder.name, results, running, files))


def page(name: str, results: Results, running: bool, files: Sequence[str]) -> str:
    refresh = f'<meta http-equiv="refresh" content="{run_page.REFRESH_S}">' if running else ""
    state = "running" if running else "done"
    return "\n".join([
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}',
        f"<title>sweep {escape(name)}: {state}</title><style>{run_page.STYLE}</style></head><body>",
        f"<h1>sweep {escape(name)}</h1>",
        f'<p>{state} <span class="soft">{escape(_counts(results))}</span></p>',
        *_coordinates(results),
        *_curves(results),
        *_table(results),
        *_links(files),
        "</body></html>\n",
    ])  # fmt: skip


def _counts(results: Results) -> str:
    counts: dict[str, int] = {}
    for line in results.lines:
        counts[line.result.status] = counts.get(line.result.status, 0) + 1
    return ", ".join(f"{n} {status}" for status, n in counts.items())


def _ranked(results: Results) -> list[ResultLine]:
    return [line for line in results.lines if line.value is not None]


def _coordinates(results: Results) -> Iterator[str]:
    """Yields parallel coordinates, if at least two cells can be compared."""
    lines = [line for line in _ranked(results) if line.values]
    keys = dict.fromkeys(key for line in lines for key in line.values)
    if len(lines) < 2 or not keys:
        return
    rows = [
        {key: line.values.get(key, "") for key in keys} | {results.metric: repr(line.value)} for line in lines
    ]
    ranks = [n / (len(lines) - 1) for n in range(len(lines))]
    titles = [f"{line.name}: {results.metric} {figure(line.value)}" for line in lines]
    yield f"<h2>Settings and {escape(results.metric)}</h2>"
    yield f"<div>{drawn(rows, titles, ranks)}</div>"


def _curves(results: Results) -> Iterator[str]:
    """Yields the loss curves of the best cells."""
    best = [line for line in results.lines if len(line.curve) and not line.result.same_as][:CURVES]
    if best:
        yield "<h2>Losses of the best cells</h2>"
        curves = {f"{number(line.name)}:": line.curve for line in best}
        yield f'<div style="max-width:800px">{charts.chart("loss", curves)}</div>'


def _table(results: Results) -> Iterator[str]:
    keys = list(dict.fromkeys(key for line in results.lines for key in line.values))
    measured = [name for name in MEASURED if any(name in line.result.metrics for line in results.lines)]
    others = [name for name in measured if name != results.metric]
    heads = ["cell", *keys, results.metric, "mean", "spread", *others, "status"]
    rows = [_row(line, keys, others, results) for line in results.lines[:MOST_LINES]]
    kept = [i for i, _ in enumerate(heads) if any(row[i] for row in rows)]
    yield "<h2>Cells</h2><table><tr>"
    yield "".join(f'<th class="soft">{escape(heads[i])}</th>' for i in kept) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{row[i]}</td>" for i in kept) + "</tr>"
    yield "</table>"
    if len(results.lines) > MOST_LINES:
        yield f'<p class="soft">and {len(results.lines) - MOST_LINES} more</p>'


def _row(line: ResultLine, keys: Sequence[str], others: Sequence[str], results: Results) -> list[str]:
    result = line.result
    mean, spread = results.groups.get(result.cell.varied, (None, None))
    page_of = quote(f"{result.same_as or line.name}/{REPORT_FILE}")
    bad = "" if result.status in ("done", "pruned", "running") else ' class="bad"'
    why = f" as {result.same_as}" if result.same_as else f": {result.error}" if result.error else ""
    front = " &#9670;" if line in results.front else ""
    return [
        f'<a href="{page_of}">{escape(line.name)}</a>{front}',
        *(escape(short_text(line.values.get(key, ""))) for key in keys),
        figure(line.value),
        figure(mean) if spread is not None else "",
        figure(spread),
        *(figure(result.metrics.get(name)) for name in others),
        f"<span{bad}>{escape(result.status + why)}</span>",
    ]


def _links(files: Sequence[str]) -> Iterator[str]:
    if files:
        yield '<p class="soft">&#9670; on the Pareto front of metric, speed and memory</p>'
        links = (f'<a href="{quote(name)}">{escape(name)}</a>' for name in files)
        yield f"<h2>Files</h2><p>{' &middot; '.join(links)}</p>"
