"""Draws predicted over measured values on logarithmic axes, with the line where they are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

SIZE, MARGIN = 420, 56
POINT = 1.6


def svg(points: Sequence[tuple[float, float]], title: str, unit: str) -> str:
    """Return the picture of ``points``, each of which is (measured, predicted)."""
    values = [v for p in points for v in p if v > 0]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return "\n".join([*_frame(low, high, title, unit), *_dots(points, low, high), "</svg>", ""])


def _at(value: float, low: int, high: int) -> float:
    return MARGIN + (log10(value) - low) / max(high - low, 1) * (SIZE - 2 * MARGIN)


def _frame(low: int, high: int, title: str, unit: str) -> Iterator[str]:
    start, end = MARGIN, SIZE - MARGIN
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" width="{SIZE}" height="{SIZE}" '
        'font-family="sans-serif" font-size="11">'
    )
    yield f'<rect width="{SIZE}" height="{SIZE}" fill="white"/>'
    yield f'<text x="{SIZE / 2}" y="24" text-anchor="middle" font-size="13">{escape(title)}</text>'
    side = end - start
    yield f'<rect x="{start}" y="{start}" width="{side}" height="{side}" fill="none" stroke="#999"/>'
    yield f'<line x1="{start}" y1="{end}" x2="{end}" y2="{start}" stroke="#999" stroke-dasharray="4 3"/>'
    for power in range(low, high + 1):
        at = _at(10.0**power, low, high)
        yield f'<text x="{at:.0f}" y="{end + 16}" text-anchor="middle">{10.0**power:g}</text>'
        yield f'<text x="{start - 6}" y="{SIZE - at + 4:.0f}" text-anchor="end">{10.0**power:g}</text>'
    yield f'<text x="{SIZE / 2}" y="{SIZE - 16}" text-anchor="middle">measured, {escape(unit)}</text>'
    middle = SIZE / 2
    turned = f"rotate(-90 16 {middle})"
    yield f'<text x="16" y="{middle}" text-anchor="middle" transform="{turned}">predicted</text>'


def _dots(points: Sequence[tuple[float, float]], low: int, high: int) -> Iterator[str]:
    for measured, predicted in points:
        if measured > 0 and predicted > 0:
            x, y = _at(measured, low, high), SIZE - _at(predicted, low, high)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{POINT}" fill="#2563eb" fill-opacity="0.45"/>'
