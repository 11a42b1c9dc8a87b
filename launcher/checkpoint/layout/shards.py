"""The shard of a tensor that each rank saves, and the shards that a box is read from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from launcher.checkpoint.layout.bounds import first, geometry
from launcher.plan.values.layout import Box, Layout


@dataclass(frozen=True)
class SavedShard:
    """A box that ``rank`` saved, the lowest of the ranks that hold it. Readers read it from there only."""

    rank: int
    box: Box


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def home(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Returns the coordinates of the ranks that save a shard: the lowest, on each axis that cuts no dim.

    A tensor without elements is saved once, by the lowest of all ranks that hold it.
    """
    cutting = () if 0 in layout.shape else layout.axes
    return tuple((axis, at) for axis, at in first(layout).items() if axis not in cutting)


def saved(layout: Layout, rank: int) -> Box | None:
    """Returns the box that ``rank`` saves.

    It is ``None`` if the rank holds nothing, an empty shard, or a copy of a lower rank's.
    """
    where = layout.grid.coords(rank)
    if any(where[axis] != at for axis, at in home(layout)):
        return None
    return saved_at_home(layout, rank)


def saved_at_home(layout: Layout, rank: int) -> Box | None:
    """Returns the same as ``saved``, for a rank that has the coordinates that ``home`` returns."""
    box = layout.box(rank)
    return box if box is not None and (0 in layout.shape or not box.empty) else None


def saved_shards(layout: Layout) -> tuple[SavedShard, ...]:
    """Returns every saved shard, ordered by rank. They tile the tensor."""
    if 0 not in layout.shape:
        return tuple(piece for piece, _ in overlapping_shards(layout, whole(layout.shape)))
    lowest = layout.grid.rank(**first(layout))
    box = layout.box(lowest)
    assert box is not None
    return (SavedShard(lowest, box),)


def overlapping_shards(layout: Layout, want: Box) -> tuple[tuple[SavedShard, Box], ...]:
    """Returns the saved shards that overlap ``want``, each with the overlap, ordered by rank.

    The result is empty if ``want`` is empty.
    """
    at = geometry(layout)
    dims = (cuts.overlapping(a, b) for cuts, a, b in zip(at.dims, want.lo, want.hi, strict=True))
    out = []
    for chosen in product(*dims):
        box = Box(tuple(lo for lo, _, _ in chosen), tuple(hi for _, hi, _ in chosen))
        both = box & want
        assert both is not None, (layout, want)
        out.append((SavedShard(at.base + sum(rank for _, _, rank in chosen), box), both))
    return tuple(sorted(out, key=lambda part: part[0].rank))


def slabs(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cuts ``box`` into boxes of at most ``limit`` bytes, in order; each is a contiguous range of its bytes.

    >>> [b.shape for b in slabs(Box((0, 0), (5, 4)), 1, 8)]
    [(2, 4), (2, 4), (1, 4)]
    """
    if box.empty:
        return
    shape = box.shape
    if not shape:
        yield box
        return

    # the dim along which a slab has several rows; a row spans all dims after it
    assert itemsize <= limit, (itemsize, limit)
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) * itemsize <= limit)
    step = limit // (prod(shape[dim + 1 :]) * itemsize)

    for outer in product(*(range(a, b) for a, b in zip(box.lo[:dim], box.hi[:dim], strict=True))):
        for at in range(box.lo[dim], box.hi[dim], step):
            lo = (*outer, at, *box.lo[dim + 1 :])
            hi = (*(i + 1 for i in outer), min(at + step, box.hi[dim]), *box.hi[dim + 1 :])
            yield Box(lo, hi)
