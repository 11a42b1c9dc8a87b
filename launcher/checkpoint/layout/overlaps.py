"""The overlaps between the saved shards of two layouts, for all ranks at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from launcher.checkpoint.layout.bounds import DimBounds, Ints, first, geometry
from launcher.plan.values.layout import Layout


@dataclass(frozen=True, eq=False)
class Overlaps:
    """One row per pair of ranks: ``elements`` is how many elements their saved shards have in common."""

    src: Ints
    dst: Ints
    elements: Ints


@lru_cache(maxsize=1024)
def overlaps(src: Layout, dst: Layout) -> Overlaps:
    """Returns the overlaps of two layouts of one tensor.

    Dims are cut independently of each other, so overlaps are computed per dim and then multiplied out.
    """
    assert src.shape == dst.shape, (src, dst)
    if 0 in src.shape:  # a tensor without elements is saved once, by one rank
        ranks = [np.array([layout.grid.rank(**first(layout))]) for layout in (src, dst)]
        return Overlaps(ranks[0], ranks[1], np.array([0]))

    a = geometry(src)
    b = geometry(dst)
    out = Overlaps(np.array([a.base]), np.array([b.base]), np.array([1]))
    for one, other in zip(a.dims, b.dims, strict=True):
        out = _times(out, _along(one, other))
    return out


def _along(src: DimBounds, dst: DimBounds) -> Overlaps:
    """Returns the overlaps along one dim: every interval that neither side cuts further."""
    starts = np.union1d(src.lo, dst.lo)
    stops = np.append(starts[1:], src.hi[-1])
    return Overlaps(_holder(src, starts), _holder(dst, starts), stops - starts)


def _holder(cuts: DimBounds, starts: Ints) -> Ints:
    return cuts.rank[np.searchsorted(cuts.lo, starts, "right") - 1]


def _times(a: Overlaps, b: Overlaps) -> Overlaps:
    return Overlaps(
        np.add.outer(a.src, b.src).ravel(),
        np.add.outer(a.dst, b.dst).ravel(),
        np.multiply.outer(a.elements, b.elements).ravel(),
    )
