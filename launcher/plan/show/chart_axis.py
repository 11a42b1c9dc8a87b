"""The axis of a chart, with ticks at round numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, log10

UNITS = (("seconds", 1.0), ("milliseconds", 1e-3), ("microseconds", 1e-6))
MOST = 10
"""The most intervals between the first tick and the last."""


@dataclass(frozen=True)
class ChartAxis:
    """An axis; ``ticks``: (position from 0 to 1, label)."""

    title: str
    ticks: tuple[tuple[float, str], ...]


def shares() -> ChartAxis:
    """Returns the axis of a time without unit."""
    return ChartAxis("share of the step", tuple((tenth / 10, f"{tenth * 10} %") for tenth in range(11)))


def seconds(total: float) -> ChartAxis:
    """Returns an axis from 0 to ``total`` seconds.

    >>> seconds(0.05).title, [label for _, label in seconds(0.05).ticks]
    ('milliseconds', ['0', '5', '10', '15', '20', '25', '30', '35', '40', '45', '50'])
    """
    title, unit = next((u for u in UNITS if total >= u[1]), UNITS[-1])
    return numbers(title, total / unit)


def numbers(title: str, most: float) -> ChartAxis:
    """Returns an axis from 0 to ``most``, in the unit that ``title`` names."""
    return ChartAxis(title, tuple((n / most if most else 0.0, f"{n:g}") for n in ticks(most)))


def ticks(most: float) -> tuple[float, ...]:
    """Returns round numbers from 0 to ``most``: at most ``MOST`` intervals of 1, 2 or 5 times a power of ten.

    >>> ticks(5.3), ticks(76)
    ((0.0, 1.0, 2.0, 3.0, 4.0, 5.0), (0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0))
    """
    if most <= 0:
        return (0.0,)
    step = next(step for step in _steps(most) if most / step <= MOST)
    return tuple(step * n for n in range(floor(most / step + 1e-9) + 1))


def _steps(most: float) -> Iterator[float]:
    power = floor(log10(most)) - 1
    yield from (digit * 10.0**p for p in (power, power + 1) for digit in (1, 2, 5))


def drawn(axis: ChartAxis, *, left: float, inner: float, bottom: float) -> Iterator[str]:
    """Draws the axis as SVG: a line of ``inner`` pixels with ticks below it."""
    for share, label in axis.ticks:
        x = left + inner * share
        yield f'<path d="M{x:.1f} {bottom}v6" stroke="#8c959f"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 19}">{label}</text>'
    yield f'<path d="M{left} {bottom}h{inner:.1f}" stroke="#8c959f"/>'
    yield f'<text class="tick" x="{left + inner / 2:.1f}" y="{bottom + 37}">{axis.title}</text>'
