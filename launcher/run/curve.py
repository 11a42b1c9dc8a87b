"""A metric over the steps of a run, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

MOST = 1000
"""The maximum number of points of a curve; with more steps, each point covers several."""


@dataclass
class Point:
    """Steps from ``first`` to ``last``, with ``count`` values."""

    first: int
    last: int
    count: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    def add(self, more: Point) -> None:
        """Merges the point of the following steps into this one."""
        self.last, self.count, self.total = more.last, self.count + more.count, self.total + more.total
        self.low, self.high = min(self.low, more.low), max(self.high, more.high)


@dataclass
class Curve:
    """A curve; ``width``: the steps per point."""

    width: int = 1
    points: list[Point] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Adds a value; a repeated step replaces all points from there on; NaN and infinity are omitted."""
        if self.points and step <= self.points[-1].last:
            self.points = [p for p in self.points if p.last < step]
        if not isfinite(value):
            return
        self._append(Point(step, step, 1, value, value, value))
        if len(self.points) > MOST:
            self.width *= 2
            before, self.points = self.points, []
            for point in before:
                self._append(point)

    def _append(self, point: Point) -> None:
        here = self.points[-1] if self.points else None
        if here is not None and here.first // self.width == point.first // self.width:
            here.add(point)
        else:
            self.points.append(point)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)


LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Splits ``values`` into equal parts, and draws the mean of each as a bar of one character.

    >>> sparkline([8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.5, 1.0]), sparkline([1.0, 1.0]), sparkline([])
    ('█▆▅▄▃▂▁▁', '▁▁', '')
    """
    parts = min(width, len(values))
    cuts = [len(values) * n // parts for n in range(parts + 1)] if parts else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    top = len(LEVELS) - 1
    return "".join(LEVELS[round(top * (m - low) / span) if span else 0] for m in means)
