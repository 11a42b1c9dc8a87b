"""The spans of ranks that cut a parameter: device matrices as strides, whatever the order of their axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from launcher.checkpoint.mindspore.formats.strategy import Slicing

DimSpans = tuple[tuple["RankSpan", ...], ...]
"""The spans that cut each dim, outermost first."""


@dataclass(frozen=True)
class RankSpan:
    """An axis given by its strides: the coordinate of rank ``r`` of a stage is ``r % hi // lo``.

    >>> [r % 4 // 2 for r in range(8)]  # RankSpan(2, 4), the middle one of [2, 2, 2]
    [0, 0, 1, 1, 0, 0, 1, 1]
    """

    lo: int
    hi: int

    @property
    def size(self) -> int:
        return self.hi // self.lo


def cuts(s: Slicing) -> DimSpans:
    """Returns the spans that cut each dim; those of optimizer sharding are the last ones of dim 0.

    Raises ``ValueError`` if optimizer sharding cannot be expressed as spans.

    >>> cuts(Slicing((2, 2, 2), ((0,), (1,)), shard_size=-1, shard_step=4))
    ((RankSpan(lo=1, hi=2), RankSpan(lo=4, hi=8)), (RankSpan(lo=2, hi=4),))
    """
    spans = []
    lo = 1
    for size in reversed(s.devices):
        spans.append(RankSpan(lo, lo * size))
        lo *= size

    # optimizer sharding is over the innermost of the ranks that repeat the slice
    dims = [tuple(spans[axis] for axis in dim) for dim in s.dims]
    if s.shards > 1:
        used = {axis for dim in s.dims for axis in dim}
        free = joined(span for axis, span in reversed([*enumerate(spans)]) if axis not in used)
        dims[0] += _innermost(free, s.shards)
    return tuple(map(joined, dims))


def joined(spans: Iterable[RankSpan]) -> tuple[RankSpan, ...]:
    """Drops spans of size 1 and joins adjacent ones; coordinates are numbered as before."""
    out: list[RankSpan] = []
    for span in spans:
        if out and out[-1].lo == span.hi:
            out[-1] = RankSpan(span.lo, out[-1].hi)
        elif span.size > 1:
            out.append(span)
    return tuple(span for span in out if span.size > 1)


def _innermost(free: Sequence[RankSpan], size: int) -> tuple[RankSpan, ...]:
    """Returns the innermost spans of ``free`` (outermost first) that together number ``size`` ranks.

    Raises ``ValueError`` if no part of ``free`` has this size.
    """
    out: list[RankSpan] = []
    left = size
    for span in reversed(free):
        if left == 1:
            break

        # the full span, or its inner part
        if left % span.size == 0:
            out.append(span)
            left //= span.size
        elif span.size % left == 0:
            out.append(RankSpan(span.lo, span.lo * left))
            left = 1
        else:
            told = f"optimizer shards of {size} ranks do not fit the repeats' axes {[s.size for s in free]}"
            raise ValueError(f"{told}; one must be a part of the other")
    return tuple(reversed(out))


def common(found: Iterable[DimSpans], ranks: int) -> tuple[RankSpan, ...] | None:
    """Returns the coarsest grid, outermost span first, whose axes can express every cut of ``found``.

    ``None`` if there is no such grid, as for 6 ranks that one tensor cuts every 2 and another every 3. For a
    single tensor there always is one.

    >>> common([((RankSpan(1, 2),),), ((RankSpan(1, 4),),)], 8)
    (RankSpan(lo=4, hi=8), RankSpan(lo=2, hi=4), RankSpan(lo=1, hi=2))
    """
    spans = [span for dims in found for dim in dims for span in dim]
    order = sorted({1, ranks, *(s.lo for s in spans), *(s.hi for s in spans)})
    if any(b % a for a, b in pairwise(order)):
        return None
    return tuple(RankSpan(a, b) for a, b in pairwise(order))[::-1]


def within(span: RankSpan, grid: Sequence[RankSpan]) -> tuple[int, ...]:
    """Returns the positions in ``grid`` of the spans that make up ``span``, outermost first."""
    return tuple(i for i, part in enumerate(grid) if span.lo <= part.lo and part.hi <= span.hi)
