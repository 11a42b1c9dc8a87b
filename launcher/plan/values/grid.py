"""A grid: ranks arranged on named axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple


def divisors(n: int) -> list[int]:
    """Returns the divisors of ``n``, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [k for k in range(1, n + 1) if n % k == 0]


class RankSpan(NamedTuple):
    """The ranks of one axis: neighbors are ``stride`` ranks apart, and there are ``size`` of them.

    The coordinate of rank ``r`` is ``r // stride % size``.
    """

    stride: int
    size: int

    @property
    def end(self) -> int:
        """The number of ranks after which coordinates repeat: the stride of the next axis outward."""
        return self.stride * self.size

    def includes(self, other: RankSpan) -> bool:
        """Returns true if ``other``, of the same chain of strides, is a part of this axis."""
        return self.stride <= other.stride and other.end <= self.end


def axis_spans(sizes: Sequence[int]) -> tuple[RankSpan, ...]:
    """Returns the span of each axis of a row-major grid.

    >>> axis_spans((2, 4))
    (RankSpan(stride=4, size=2), RankSpan(stride=1, size=4))
    """
    strides = (prod(sizes[at + 1 :]) for at in range(len(sizes)))
    return tuple(map(RankSpan, strides, sizes))


@dataclass(frozen=True)
class Grid:
    """Ranks arranged on named axes, outermost axis first (row-major).

    >>> grid = Grid.of(pp=2, dp_replicate=1, dp_shard=4)
    >>> grid.coords(6)
    {'pp': 1, 'dp_replicate': 0, 'dp_shard': 2}
    >>> grid.peers(6, "dp_shard")
    (4, 5, 6, 7)
    """

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, **sizes: int) -> Grid:
        return cls(tuple(sizes.items()))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(n for _, n in self.axes)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return dict(self.axes)

    @cached_property
    def spans(self) -> Mapping[str, RankSpan]:
        """The spans of the axes of more than one rank, outermost first."""
        spans = axis_spans([n for _, n in self.axes])
        return {axis: span for (axis, n), span in zip(self.axes, spans, strict=True) if n > 1}

    def __getitem__(self, axis: str) -> int:
        return self.sizes[axis]

    def coords(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of ``rank`` on each axis."""
        out: dict[str, int] = {}
        for name, n in reversed(self.axes):
            rank, out[name] = divmod(rank, n)
        return dict(reversed(out.items()))

    def rank(self, **coords: int) -> int:
        """Returns the rank at ``coords``; every axis must be given."""
        at = 0
        for name, n in self.axes:
            at = at * n + coords[name]
        return at

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Returns ``rank`` and the ranks that differ from it only along ``axes``, in ascending order."""
        here = self.coords(rank)
        places = product(*(range(self[a]) for a in axes))
        return tuple(sorted(self.rank(**here | dict(zip(axes, at, strict=True))) for at in places))

    def ranks(self, **fixed: int) -> tuple[int, ...]:
        """Returns the ranks whose coordinates agree with ``fixed``, in ascending order."""
        if not fixed.keys() <= self.sizes.keys():
            return ()
        out = [0]
        for name, n in self.axes:
            places = [i for i in range(n) if fixed.get(name, i) == i]
            out = [at * n + i for at in out for i in places]
        return tuple(out)

    def alike(self, *axes: str, **fixed: int) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks whose coordinates agree with ``fixed``, grouped by their coordinates on ``axes``.

        The ranks of a group are in ascending order.

        >>> Grid.of(pp=2, dp_replicate=2, dp_shard=2).alike("dp_shard", pp=1)
        ((4, 6), (5, 7))
        """
        free = [a for a in dict.fromkeys(axes) if a not in fixed]
        places = product(*(range(self[a]) for a in free))
        return tuple(self.ranks(**fixed, **dict(zip(free, at, strict=True))) for at in places)
