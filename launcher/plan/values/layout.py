"""Where the pieces of one tensor live: layout algebra on plain integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from launcher.plan.values.grid import Grid, RankSpan


@dataclass(frozen=True, order=True)
class Box:
    """Half-open hyper-rectangle of tensor indices. A 0-d tensor is the box with no bounds.

    >>> Box((0, 0), (4, 8)) & Box((2, 4), (6, 8))
    Box(lo=(2, 4), hi=(4, 8))
    """

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def empty(self) -> bool:
        return any(a >= b for a, b in zip(self.lo, self.hi, strict=True))

    def __and__(self, other: Box) -> Box | None:
        """Returns the intersection of both boxes; ``None`` if it is empty."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        box = Box(lo, hi)
        return None if box.empty else box

    def within(self, outer: Box) -> Box:
        """Returns this box in coordinates relative to ``outer``'s corner."""
        return Box(
            tuple(a - o for a, o in zip(self.lo, outer.lo, strict=True)),
            tuple(b - o for b, o in zip(self.hi, outer.lo, strict=True)),
        )


@dataclass(frozen=True)
class Layout:
    """The distribution of one tensor over the ranks of a grid.

    ``split[d]`` names the axes that cut dim ``d``, outermost first. ``at`` pins an axis to the coordinates
    that hold the tensor: a parameter of stage 1 has ``at=(("pp", (1,)),)``, one that is tied over two stages
    ``at=(("pp", (0, 3)),)``. Along all other axes the tensor is replicated. Ragged dims are cut as
    ``torch.chunk`` does: pieces of the rounded-up size first, and the last ones may be empty.

    >>> w = Layout(Grid.of(pp=2, dp_shard=4), (8, 6), (("dp_shard",), ()), (("pp", (1,)),))
    >>> w.box(5)
    Box(lo=(2, 0), hi=(4, 6))
    >>> w.box(0) is None
    True
    """

    grid: Grid
    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    at: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def holds(self, rank: int) -> bool:
        """Returns true if ``rank`` has this tensor at all (its piece may still be empty)."""
        where = self.grid.coords(rank)
        return all(where[axis] in places for axis, places in self.at)

    def box(self, rank: int) -> Box | None:
        """Returns the box of ``rank``, which may be empty (ragged dims).

        Returns ``None`` if it does not have the tensor.
        """
        if not self.holds(rank):
            return None
        where = self.grid.coords(rank)
        lo, hi = [], []
        for n, axes in zip(self.shape, self.split, strict=True):
            a, b = 0, n
            for axis in axes:
                chunk = -(-(b - a) // self.grid[axis])  # ceil, as torch.chunk
                a, b = min(a + chunk * where[axis], b), min(a + chunk * (where[axis] + 1), b)
            lo.append(a)
            hi.append(b)
        return Box(tuple(lo), tuple(hi))

    def holders(self) -> dict[Box, tuple[int, ...]]:
        """Returns each distinct non-empty box and the ranks that hold a copy of it, ascending.

        A tensor with a dim of size 0 has one (empty) box.
        """
        out: dict[Box, tuple[int, ...]] = {}
        for rank in range(self.grid.size):
            box = self.box(rank)
            if box is not None and (not box.empty or 0 in self.shape):
                out[box] = (*out.get(box, ()), rank)
        return out

    def twins(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the same stage with the same elements as ``rank``, itself included."""
        pinned = {axis for axis, _ in self.at}
        free = [a for a, _ in self.grid.axes if a not in pinned and a not in self.axes]
        return self.grid.peers(rank, *free)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut this tensor, in dim order."""
        return tuple(axis for axes in self.split for axis in axes)

    @property
    def even(self) -> bool:
        """True if all pieces have the same size.

        >>> grid = Grid.of(dp_shard=2, tp=2)
        >>> [Layout(grid, (n,), (("tp", "dp_shard"),)).even for n in (8, 6)]
        [True, False]
        """
        cut = zip(self.shape, self.split, strict=True)
        return all(n % prod(self.grid[axis] for axis in axes) == 0 for n, axes in cut)


DimSpans = tuple[tuple[RankSpan, ...], ...]
"""The spans of ranks that cut each dim, outermost first."""


def rank_spans(layout: Layout) -> DimSpans:
    """Returns the spans of ranks that cut each dim.

    Spans that continue each other are joined if the dim divides evenly; if it does not, cutting twice differs
    from cutting once.

    >>> rank_spans(Layout(Grid.of(pp=2, dp=2, tp=2), (8, 6), (("dp", "tp"), ())))
    ((RankSpan(stride=1, size=4),), ())
    """
    places = layout.grid.spans
    out = []
    for n, axes in zip(layout.shape, layout.split, strict=True):
        spans = tuple(places[axis] for axis in axes if axis in places)
        even = n % prod(span.size for span in spans) == 0
        out.append(joined(spans) if even else spans)
    return tuple(out)


def joined(spans: Iterable[RankSpan]) -> tuple[RankSpan, ...]:
    """Joins adjacent spans, and leaves out those of one rank; coordinates are numbered as before."""
    out: list[RankSpan] = []
    for span in spans:
        if out and out[-1].stride == span.end:
            out[-1] = RankSpan(span.stride, out[-1].size * span.size)
        elif span.size > 1:
            out.append(span)
    return tuple(out)


def common_axes(dims: Iterable[Iterable[RankSpan]], ranks: int) -> tuple[RankSpan, ...] | None:
    """Returns the fewest axes over ``ranks`` ranks that express the cuts of all ``dims``, outermost first.

    ``None`` if there are none, as for 6 ranks that one tensor cuts every 2 and another every 3. For the cuts
    of a single tensor they always exist.

    >>> common_axes([[RankSpan(1, 2)], [RankSpan(1, 4)]], 8)
    (RankSpan(stride=4, size=2), RankSpan(stride=2, size=2), RankSpan(stride=1, size=2))
    """
    spans = [span for dim in dims for span in dim]
    strides = sorted({1, ranks, *(span.stride for span in spans), *(span.end for span in spans)})
    if any(high % low for low, high in pairwise(strides)):
        return None
    return tuple(RankSpan(low, high // low) for low, high in pairwise(strides))[::-1]


def within(span: RankSpan, axes: Sequence[RankSpan]) -> tuple[int, ...]:
    """Returns the positions in ``axes`` of those that make up ``span``, outermost first."""
    return tuple(at for at, axis in enumerate(axes) if span.includes(axis))


@dataclass(frozen=True)
class BoxCopy:
    """Copy ``box`` (global indices) from ``src`` to ``dst`` (ranks of the two layouts)."""

    src: int
    dst: int
    box: Box


def moves(src: Layout, dst: Layout, rank: int) -> tuple[BoxCopy, ...]:
    """Returns the copies that give ``rank`` its box of ``dst``.

    A source is the rank's own copy where it has one, otherwise the lowest rank with a copy.
    """
    target = dst.box(rank)
    if target is None:
        return ()
    out = []
    for box, ranks in src.holders().items():
        part = box if box == target else box & target  # an empty tensor is moved too, as one empty box
        if part is not None:
            out.append(BoxCopy(rank if rank in ranks else ranks[0], rank, part))
    return tuple(out)
