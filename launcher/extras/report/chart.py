"""Charts of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from math import floor, isclose, log10

from launcher.plan.show.chart_axis import ticks
from launcher.run.curve import Curve

WIDE, HIGH = 560, 200
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 26
COLORS = (
    "#2c6fbb", "#d9902f", "#2e8b57", "#8250df", "#cf222e", "#1b9aaa",
)  # fmt: skip
STYLE = (
    "text{font-family:sans-serif;font-size:11px;fill:#6e7781}"
    ".head{font-size:13px;font-weight:600;fill:#24292f}.end{text-anchor:end}.mid{text-anchor:middle}"
)


def chart(title: str, curves: Mapping[str, Curve]) -> str:
    """Draws curves on one scale; a pale band shows the range of the values that each point averages."""
    inner, room = WIDE - LEFT - RIGHT, HIGH - TOP - BOTTOM
    points = [p for curve in curves.values() for p in curve]
    first, last = min(p.first for p in points), max(p.last for p in points)
    low, high = _range(min(p.low for p in points), max(p.high for p in points))

    def x(step: float) -> float:
        return LEFT + inner * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return TOP + room * (1 - (value - low) / (high - low))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="head" x="{LEFT}" y="18">{escape(title)}</text>',
    ]
    for value in _marks(low, high):
        lines.append(f'<path d="M{LEFT} {y(value):.1f}h{inner}" stroke="#d8dee4"/>')
        lines.append(f'<text class="end" x="{LEFT - 6}" y="{y(value) + 4:.1f}">{value:.6g}</text>')
    for step in (first, (first + last) // 2, last) if last > first + 1 else sorted({first, last}):
        lines.append(f'<text class="mid" x="{x(step):.1f}" y="{HIGH - 8}">{step}</text>')
    at = LEFT + 8 * len(title) + 24
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        lines += _line(name, curve, color, [(x((p.first + p.last) / 2), y(p.mean)) for p in curve])
        if any(p.count > 1 for p in curve):
            band = [(x((p.first + p.last) / 2), y(p.high)) for p in curve]
            band += [(x((p.first + p.last) / 2), y(p.low)) for p in reversed(curve.points)]
            lines.insert(3, f'<path d="{_path(band)}z" fill="{color}" opacity="0.15"/>')
        text = f"{name} {curve.points[-1].mean:.5g}".strip()
        lines.append(f'<text x="{at}" y="18" style="fill:{color}">{escape(text)}</text>')
        at += 6 * len(text) + 16
    return "".join([*lines, "</svg>"])


def _line(name: str, curve: Curve, color: str, at: list[tuple[float, float]]) -> Iterator[str]:
    """Yields a line; if it has few points, these are marked and show their values on hover."""
    yield f'<path d="{_path(at)}" fill="none" stroke="{color}" stroke-width="1.5"/>'
    if len(curve) <= 60:
        for (x, y), p in zip(at, curve, strict=True):
            label = escape(f"{name} {p.mean:.6g} at step {p.last}")
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{color}"><title>{label}</title></circle>'


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _range(low: float, high: float) -> tuple[float, float]:
    """Returns the range with some margin at both ends; never empty."""
    if isclose(low, high):
        room = abs(low) * 0.05 or 1.0
        return low - room, high + room
    room = 0.05 * (high - low)
    return low - room, high + room


def _marks(low: float, high: float) -> list[float]:
    """Returns three to six round numbers between the two.

    >>> _marks(1.9, 4.3), _marks(0.00012, 0.00034)
    ([2.0, 2.5, 3.0, 3.5, 4.0], [0.00015, 0.0002, 0.00025, 0.0003])
    """
    power = 10.0 ** floor(log10(high - low))
    step = next(s for s in (power / 5, power / 2, power, 2 * power) if (high - low) / s <= 6)
    count = len(ticks((high - low) / step))
    first = -floor(-low / step)  # ceil
    marks = [float(f"{step * (first + n):.12g}") for n in range(count + 1)]
    return [value for value in marks if low <= value <= high]
