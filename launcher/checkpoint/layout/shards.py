"""Boxes of shards: which rank saves each of them, and which of them overlap."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from math import prod

import numpy as np
import numpy.typing as npt

from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DimBounds:
    """The non-empty parts of one dim, in order.

    Part i has the elements from ``lo[i]`` up to ``hi[i]``. The rank that saves a shard is a sum with a term
    for each dim; ``rank[i]`` is the term of part i.
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
    """Maps shards to ranks: the rank that saves a shard is ``base`` plus the ``rank`` of each part."""

    base: int
    dims: tuple[DimBounds, ...]


@lru_cache(maxsize=8192)
def geometry(layout: Layout) -> Geometry:
    strides = _strides(layout.grid)
    dims = tuple(
        _cuts(n, tuple((layout.grid[axis], strides[axis]) for axis in axes))
        for n, axes in zip(layout.shape, layout.split, strict=True)
    )
    return Geometry(sum(at * strides[axis] for axis, at in lowest_coordinates(layout).items()), dims)


def lowest_coordinates(layout: Layout) -> dict[str, int]:
    """Returns, by axis, the lowest coordinate whose ranks hold the tensor."""
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


@dataclass(frozen=True)
class SavedShard:
    """A box of a tensor and the rank that saved it, which is the lowest rank that has it.

    Readers take it from this rank's file only.
    """

    rank: int
    box: Box


def full_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def home(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Returns the coordinates of the ranks that save a shard: the lowest one on each axis that cuts no dim.

    A tensor without elements is saved once, by the lowest of all ranks that hold it.
    """
    cutting = () if 0 in layout.shape else layout.axes
    return tuple((axis, at) for axis, at in lowest_coordinates(layout).items() if axis not in cutting)


def saved(layout: Layout, rank: int) -> Box | None:
    """Returns the box that ``rank`` saves.

    It is ``None`` if the rank holds nothing, an empty shard, or a copy of a lower rank's shard.
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
        return tuple(piece for piece, _ in overlapping_shards(layout, full_box(layout.shape)))
    lowest = layout.grid.rank(**lowest_coordinates(layout))
    box = layout.box(lowest)
    assert box is not None
    return (SavedShard(lowest, box),)


def overlapping_shards(layout: Layout, target: Box) -> tuple[tuple[SavedShard, Box], ...]:
    """Returns the saved shards that overlap ``target``, each with the overlap, ordered by rank.

    The result is empty if ``target`` is empty.
    """
    at = geometry(layout)
    dims = (cuts.overlapping(a, b) for cuts, a, b in zip(at.dims, target.lo, target.hi, strict=True))
    out = []
    for chosen in product(*dims):
        box = Box(tuple(lo for lo, _, _ in chosen), tuple(hi for _, hi, _ in chosen))
        both = box & target
        assert both is not None, (layout, target)
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


@dataclass(frozen=True, eq=False)
class Overlaps:
    """One row per pair of ranks; ``elements`` is the number of elements that both saved shards contain."""

    src: Ints
    dst: Ints
    elements: Ints


@lru_cache(maxsize=1024)
def overlaps(src: Layout, dst: Layout) -> Overlaps:
    """Returns the overlaps of two layouts of one tensor.

    Dims are cut independently of each other, so overlaps are computed per dim and then combined.
    """
    assert src.shape == dst.shape, (src, dst)
    if 0 in src.shape:  # a tensor without elements is saved once, by one rank
        ranks = [np.array([layout.grid.rank(**lowest_coordinates(layout))]) for layout in (src, dst)]
        return Overlaps(ranks[0], ranks[1], np.array([0]))

    a = geometry(src)
    b = geometry(dst)
    out = Overlaps(np.array([a.base]), np.array([b.base]), np.array([1]))
    for one, other in zip(a.dims, b.dims, strict=True):
        out = _times(out, _along(one, other))
    return out


def _along(src: DimBounds, dst: DimBounds) -> Overlaps:
    """Returns the overlaps along one dim: the intervals between all cuts of both sides."""
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


STEPS = 32
"""The most visits in ``_overlap`` per piece. Pieces of a grid take two per dim; others may take many more."""


class _Uneven(Exception):
    pass


def untiled(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Returns why ``boxes`` do not tile a tensor of ``shape``; ``None`` if they do.

    >>> untiled((4,), [Box((0,), (2,)), Box((2,), (4,))]), untiled((4,), [Box((0,), (2,)), Box((1,), (3,))])
    (None, 'its pieces at [0] and [1] overlap')
    """
    bounds = Box((0,) * len(shape), shape)
    full = [box for box in boxes if not box.empty]
    for box in full:
        if (box & bounds) != box:
            return f"its piece from {list(box.lo)} to {list(box.hi)} lies outside {list(shape)}"

    try:
        both = _overlap(full, 0, [STEPS * len(full)])
    except _Uneven:
        return f"its {len(full)} pieces are cut too unevenly: no grid cuts a tensor like this"
    if both:
        return f"its pieces at {list(both[0].lo)} and {list(both[1].lo)} overlap"

    # boxes that do not overlap tile the tensor if they have as many elements as the tensor
    if sum(prod(box.shape) for box in full) != prod(shape):
        return f"its pieces do not add up to {list(shape)}"
    return None


def _overlap(boxes: Sequence[Box], dim: int, budget: list[int]) -> tuple[Box, Box] | None:
    """Returns two boxes that share an element, or ``None``.

    The edges along ``dim`` make slabs; within each slab, boxes are compared along the dims after it.
    ``budget`` holds the number of visits of boxes that remain; ``_Uneven`` is raised when none remain.
    """
    budget[0] -= len(boxes)
    if len(boxes) < 2:
        return None
    if budget[0] < 0:
        raise _Uneven
    if dim == len(boxes[0].lo):
        return boxes[0], boxes[1]

    # which boxes start at each edge
    edges = sorted({edge for box in boxes for edge in (box.lo[dim], box.hi[dim])})
    starts: dict[int, list[Box]] = {edge: [] for edge in edges}
    for box in boxes:
        starts[box.lo[dim]].append(box)

    # the boxes of each slab; if none starts there, all of them were compared in the previous slab
    open_boxes: list[Box] = []
    for a, _ in pairwise(edges):
        open_boxes = [box for box in open_boxes if box.hi[dim] > a] + starts[a]
        budget[0] -= len(open_boxes) // 8  # these visits are cheap
        pair = _overlap(open_boxes, dim + 1, budget) if starts[a] else None
        if pair:
            return pair
    return None
