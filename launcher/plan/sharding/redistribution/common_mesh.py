"""One device matrix that expresses two layouts, with as few axes as possible."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import prod

from launcher.plan.sharding.tensor_layout import TensorLayout


@lru_cache(maxsize=1 << 16)
def on_common_mesh(a: TensorLayout, b: TensorLayout) -> tuple[TensorLayout, TensorLayout] | None:
    """Returns both layouts over the same axes.

    ``None`` if no matrix refines both, as for ``(3, 4)`` and ``(4, 3)``.

    >>> on_common_mesh(TensorLayout((8,), ((0,), ())), TensorLayout((2, 4), ((1,), (0,))))[0]
    TensorLayout(matrix=(2, 4), dims=((0, 1), ()), partial=())
    """
    assert a.ranks == b.ranks, f"{a} and {b} are not over the same ranks"
    a, b = a.canonical, b.canonical

    # row-major matrices share a refinement exactly when their strides form one chain of divisors
    strides = sorted({*_strides(a.matrix), *_strides(b.matrix)})
    if any(high % low for low, high in pairwise(strides)):
        return None
    sizes = tuple(high // low for low, high in reversed(list(pairwise(strides))))
    return _over(a, sizes), _over(b, sizes)


def strides(matrix: tuple[int, ...]) -> tuple[int, ...]:
    """The distance between ranks that are neighbours on each axis."""
    return tuple(prod(matrix[a + 1 :]) for a in range(len(matrix)))


def _strides(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return (*strides(matrix), prod(matrix))


def _over(layout: TensorLayout, sizes: tuple[int, ...]) -> TensorLayout:
    """Returns ``layout`` over the finer axes of ``sizes``; each of its axes is a product of some of them."""
    finer: list[tuple[int, ...]] = []
    at = 0
    for n in layout.matrix:
        start = at
        while prod(sizes[start:at]) < n:
            at += 1
        finer.append(tuple(range(start, at)))
    dims = tuple(tuple(f for a in axes for f in finer[a]) for axes in layout.dims)
    return TensorLayout(sizes, dims, tuple(f for a in layout.partial for f in finer[a]))
