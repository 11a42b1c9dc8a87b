"""Draws parallel coordinates: an axis per setting and for the metric, a line per cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isfinite, log10

from launcher.sweep.results.table import short

WIDE, HIGH = 1120, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 90, 40, 30
STYLE = "text{font-family:sans-serif;font-size:11px;fill:#57606a}.head{font-weight:600;fill:#24292f}"
BEST, WORST = (44, 111, 187), (208, 215, 222)
LOG = 20.0
"""An axis is logarithmic if its largest value is at least this many times the smallest."""
APART = 12
"""The minimum distance of two labels beside an axis, in pixels."""


class _Axis:
    """Maps values to heights from 0 to 1: numbers by their size, words in sorted order."""

    def __init__(self, values: Sequence[str]) -> None:
        numbers = [_number(v) for v in values]
        self._numeric = None not in numbers
        if self._numeric:
            found = sorted({n for n in numbers if n is not None})
            self._log = found[0] > 0 and found[-1] / found[0] >= LOG
            self.words = sorted({*values}, key=float)
            low, high = self._scaled(found[0]), self._scaled(found[-1])
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
    """An SVG of ``rows``, which have the same keys, one row per cell; ``ranks``: 0 for the best to 1.

    ``titles``: the tooltip of each cell's line.
    """
    keys = list(rows[0])
    axes = {key: _Axis([row[key] for row in rows]) for key in keys}
    across, height = (WIDE - LEFT - RIGHT) / max(len(keys) - 1, 1), HIGH - TOP - BOTTOM

    def y(key: str, value: str) -> float:
        return TOP + height * (1 - axes[key].at(value))

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" role="img">',
        f"<title>Settings and what came of them</title><style>{STYLE}</style>",
    ]
    worst_first = sorted(range(len(rows)), key=lambda n: -ranks[n])
    for n in worst_first:
        points = "L".join(f"{LEFT + i * across:.1f} {y(key, rows[n][key]):.1f}" for i, key in enumerate(keys))
        wide = 2.5 if ranks[n] == 0 else 1.2
        line = f'<path d="M{points}" fill="none" stroke="{_colour(ranks[n])}" stroke-width="{wide}">'
        out.append(f"{line}<title>{escape(titles[n])}</title></path>")
    for i, key in enumerate(keys):
        x = LEFT + i * across
        out.append(f'<path d="M{x:.1f} {TOP}v{height}" stroke="#24292f"/>')
        out.append(f'<text class="head" x="{x:.1f}" y="{TOP - 14}" text-anchor="middle">{escape(key)}</text>')
        for word in axes[key].marks:
            text = escape(short(word))
            out.append(f'<text x="{x + 5:.1f}" y="{y(key, word) + 4:.1f}">{text}</text>')
    return "".join([*out, "</svg>"])


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def _colour(rank: float) -> str:
    mixed = (round(b + (w - b) * rank) for b, w in zip(BEST, WORST, strict=True))
    return f"rgb({','.join(map(str, mixed))})"
