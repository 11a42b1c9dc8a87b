"""The bounds at which a layout cuts each dim, computed once for all ranks."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DimBounds:
    """The non-empty parts of one dim, in order.

    A part has the elements from ``lo`` up to ``hi``; ``rank`` is what it adds to the number of the rank that
    saves a shard.
    """

    lo: Ints
    hi: Ints
    rank: Ints

    @cached_property
    def listed(self) -> tuple[list[int], list[int], list[int]]:
        """The arrays ``lo``, ``hi`` and ``rank`` as lists of Python integers."""
        return self.lo.tolist(), self.hi.tolist(), self.rank.tolist()

    def overlapping(self, lo: int, hi: int) -> list[tuple[int, int, int]]:
        """Returns (lo, hi, rank) of the parts that overlap the elements from ``lo`` up to ``hi``."""
        starts, stops, ranks = self.listed
        first = max(bisect_right(starts, lo) - 1, 0)
        last = bisect_right(starts, hi - 1)
        return [(starts[i], stops[i], ranks[i]) for i in range(first, last) if lo < hi]


@dataclass(frozen=True, eq=False)
class Geometry:
    """Maps shards to ranks: the shard at some parts is saved by ``base`` plus the ``rank`` of each part."""

    base: int
    dims: tuple[DimBounds, ...]


@lru_cache(maxsize=8192)
def geometry(layout: Layout) -> Geometry:
    strides = _strides(layout.grid)
    dims = tuple(
        _cuts(n, tuple((layout.grid[axis], strides[axis]) for axis in axes))
        for n, axes in zip(layout.shape, layout.split, strict=True)
    )
    return Geometry(sum(at * strides[axis] for axis, at in first(layout).items()), dims)


def first(layout: Layout) -> dict[str, int]:
    """Returns the lowest coordinates that hold the tensor, by axis."""
    at = dict(layout.at)
    return {axis: min(at.get(axis, (0,))) for axis, _ in layout.grid.axes}


def _strides(grid: Grid) -> dict[str, int]:
    sizes = [n for _, n in reversed(grid.axes)]
    steps = accumulate([1, *sizes[:-1]], lambda a, b: a * b)
    return {axis: step for (axis, _), step in zip(reversed(grid.axes), steps, strict=False)}


@lru_cache(maxsize=8192)
def _cuts(n: int, axes: tuple[tuple[int, int], ...]) -> DimBounds:
    """Cuts a dim of ``n`` elements as ``Layout.box`` does.

    ``axes`` are (size, stride in ranks), outermost first.
    """
    lo = np.array([0])
    hi = np.array([n])
    rank = np.array([0])
    for size, stride in axes:
        at = np.arange(size)
        chunk = ((hi - lo + size - 1) // size)[:, None]  # ceil, as torch.chunk
        starts = lo[:, None] + chunk * at
        stops = starts + chunk

        # parts past the end are empty
        ends = hi[:, None]
        lo = np.minimum(starts, ends).ravel()
        hi = np.minimum(stops, ends).ravel()
        rank = (rank[:, None] + stride * at).ravel()

    some = lo < hi
    return DimBounds(lo[some], hi[some], rank[some])
