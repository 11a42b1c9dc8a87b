"""Layouts over device matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from launcher.plan.values.layout import Box


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor is distributed over the ranks of one stage.

    ``matrix``: the sizes of the axes of the device matrix, outermost first (row-major). ``dims[d]``: the axes
    that cut dim d, outermost first. ``partial``: the axes over which ranks hold terms of a sum. Over all
    other axes the tensor is repeated. Slices divide their dims: no cut is ragged.

    >>> TensorLayout((2, 4), ((0,), (1,))).local_shape((8, 8))
    (4, 2)
    >>> TensorLayout((2, 4), ((1, 0),)).box((8,), rank=1)  # strided
    Box(lo=(2,), hi=(3,))
    """

    matrix: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()

    @classmethod
    def replicated(cls, dims: int, ranks: int) -> TensorLayout:
        """Returns the layout of a tensor that every rank has in full."""
        return cls((ranks,), ((),) * dims)

    @property
    def ranks(self) -> int:
        return prod(self.matrix)

    @cached_property
    def slices(self) -> tuple[int, ...]:
        """The number of parts that each dim is cut into."""
        return tuple(prod(self.matrix[a] for a in axes) for axes in self.dims)

    @property
    def repeated(self) -> tuple[int, ...]:
        """The axes over which the tensor is repeated."""
        used = {a for axes in self.dims for a in axes}
        return tuple(a for a in range(len(self.matrix)) if a not in used and a not in self.partial)

    def summed(self) -> TensorLayout:
        """Returns the layout after the terms are summed, with the sum on each rank that had a term."""
        return TensorLayout(self.matrix, self.dims) if self.partial else self

    def divides(self, shape: tuple[int, ...]) -> bool:
        """Returns true if a tensor of ``shape`` can have this layout."""
        return len(shape) == len(self.dims) and all(
            n % k == 0 for n, k in zip(shape, self.slices, strict=True)
        )

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a rank's part of a tensor of ``shape``."""
        return tuple(n // k for n, k in zip(shape, self.slices, strict=True))

    def coords(self, rank: int) -> tuple[int, ...]:
        """Returns the coordinate of a rank of the stage (0-based) on each axis."""
        out = []
        for n in reversed(self.matrix):
            rank, at = divmod(rank, n)
            out.append(at)
        return tuple(reversed(out))

    def part(self, axes: tuple[int, ...], rank: int) -> int:
        """Returns the index of the part of ``rank`` among those that ``axes`` cut, outermost first."""
        at, index = self.coords(rank), 0
        for a in axes:
            index = index * self.matrix[a] + at[a]
        return index

    def box(self, shape: tuple[int, ...], rank: int) -> Box:
        """Returns the part of a tensor of ``shape`` that ``rank`` has."""
        sizes = self.local_shape(shape)
        parts = [self.part(axes, rank) for axes in self.dims]
        low = tuple(p * n for p, n in zip(parts, sizes, strict=True))
        return Box(low, tuple(a + n for a, n in zip(low, sizes, strict=True)))

    @cached_property
    def canonical(self) -> TensorLayout:
        """The equivalent layout with the fewest axes.

        >>> TensorLayout((2, 2, 1, 2), ((0, 1), ())).canonical
        TensorLayout(matrix=(4, 2), dims=((0,), ()), partial=())
        """
        return _canonical(self)

    @cached_property
    def over_primes(self) -> TensorLayout:
        """The equivalent layout over axes of prime sizes.

        >>> TensorLayout((2, 6), ((1,), ())).over_primes
        TensorLayout(matrix=(2, 2, 3), dims=((1, 2), ()), partial=())
        """
        parts: list[tuple[int, ...]] = []
        sizes: list[int] = []
        for n in self.matrix:
            own = primes(n)
            parts.append(tuple(range(len(sizes), len(sizes) + len(own))))
            sizes += own
        dims = tuple(tuple(b for a in axes for b in parts[a]) for axes in self.dims)
        return TensorLayout(tuple(sizes), dims, tuple(b for a in self.partial for b in parts[a]))


@lru_cache(maxsize=1 << 16)
def _canonical(layout: TensorLayout) -> TensorLayout:
    groups: list[list[int]] = []
    for a in (a for a, n in enumerate(layout.matrix) if n > 1):
        if groups and _beside(layout, groups[-1][-1], a):
            groups[-1].append(a)
        else:
            groups.append([a])
    new = {a: i for i, group in enumerate(groups) for a in group[:1]}
    dims = tuple(tuple(new[a] for a in axes if a in new) for axes in layout.dims)
    partial = tuple(sorted(new[a] for a in layout.partial if a in new))
    return TensorLayout(tuple(prod(layout.matrix[a] for a in g) for g in groups), dims, partial)


def _beside(layout: TensorLayout, a: int, b: int) -> bool:
    """Returns true if two consecutive axes can be merged into one."""
    for axes in layout.dims:
        if a in axes:
            after = (x for x in axes[axes.index(a) + 1 :] if layout.matrix[x] > 1)
            return next(after, None) == b
    cut = {x for axes in layout.dims for x in axes}
    return b not in cut and (a in layout.partial) == (b in layout.partial)


def primes(n: int) -> list[int]:
    """Returns the prime factors of ``n``, ascending.

    >>> primes(12)
    [2, 2, 3]
    """
    out, p = [], 2
    while n > 1:
        while n % p == 0:
            out.append(p)
            n //= p
        p += 1
    return out
