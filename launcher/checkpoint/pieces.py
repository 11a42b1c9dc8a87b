"""Which piece of a tensor is saved by which rank, and which pieces a box is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from launcher.plan.layout import Box, Layout


@dataclass(frozen=True)
class Piece:
    """A box as ``rank`` saved it: the lowest of the ranks that hold it. Readers look nowhere else."""

    rank: int
    box: Box


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def saved(layout: Layout, rank: int) -> Box | None:
    """What ``rank`` must save: ``None`` when it holds nothing, an empty piece, or a copy of a lower rank's."""
    where, first = layout.grid.coords(rank), _first(layout)
    # a tensor without elements is saved once, by the lowest of all holders
    free = () if 0 in layout.shape else layout.axes
    if any(where[axis] != at for axis, at in first.items() if axis not in free):
        return None
    box = layout.box(rank)
    return box if box is not None and (0 in layout.shape or not box.empty) else None


def pieces(layout: Layout) -> tuple[Piece, ...]:
    """Every saved piece, by rank. They tile the tensor."""
    first, axes = _first(layout), layout.axes
    ranks = (
        layout.grid.rank(**first | dict(zip(axes, at, strict=True)))
        for at in product(*(range(layout.grid[axis]) for axis in axes))
    )
    found = ((rank, saved(layout, rank)) for rank in sorted(ranks))
    return tuple(Piece(rank, box) for rank, box in found if box is not None)


def parts(layout: Layout, want: Box) -> tuple[tuple[Piece, Box], ...]:
    """The saved pieces that overlap ``want``, each with the overlap; none when ``want`` is empty."""
    found = ((piece, piece.box & want) for piece in pieces(layout))
    return tuple((piece, both) for piece, both in found if both is not None)


def slabs(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """``box`` cut into boxes of at most ``limit`` bytes, each one run of its bytes, in order.

    >>> [b.shape for b in slabs(Box((0, 0), (5, 4)), 1, 8)]
    [(2, 4), (2, 4), (1, 4)]
    """
    if box.empty:
        return
    shape = box.shape
    if not shape:
        yield box
        return
    assert itemsize <= limit, (itemsize, limit)
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) * itemsize <= limit)
    step = limit // (prod(shape[dim + 1 :]) * itemsize)
    for outer in product(*(range(a, b) for a, b in zip(box.lo[:dim], box.hi[:dim], strict=True))):
        for at in range(box.lo[dim], box.hi[dim], step):
            lo = (*outer, at, *box.lo[dim + 1 :])
            hi = (*(i + 1 for i in outer), min(at + step, box.hi[dim]), *box.hi[dim + 1 :])
            yield Box(lo, hi)


def _first(layout: Layout) -> dict[str, int]:
    """The lowest coordinates that hold the tensor."""
    at = dict(layout.at)
    return {axis: min(at.get(axis, (0,))) for axis, _ in layout.grid.axes}
