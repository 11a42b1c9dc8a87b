"""A canonical form of a layout, which does not depend on how the axes of the grid are named."""

from __future__ import annotations

from math import prod

from launcher.plan.values.layout import Layout

RankStride = tuple[int, int]
"""The distance between neighbouring ranks, and how many ranks there are."""


def meaning(layout: Layout) -> list[object]:
    """Returns for each dim the spans of ranks that cut it, outermost first, then the pinned spans.

    Two layouts with equal results put the same parts on the same ranks. Axes of one rank are left out.
    Adjacent spans whose ranks are consecutive are joined if the dim divides evenly; if it does not, cutting
    twice differs from cutting once.

    >>> from launcher.plan.values.grid import Grid
    >>> a = Layout(Grid.of(pp=2, dp=2, tp=2), (8,), (("dp", "tp"),), (("pp", (1,)),))
    >>> b = Layout(Grid.of(s=2, d0=1, d1=4), (8,), (("d1",),), (("s", (1,)),))
    >>> meaning(a) == meaning(b)
    True
    >>> meaning(a)
    [[[(1, 4)]], [(4, 2, (1,))]]
    """
    spans = {}
    stride = 1
    for axis, size in reversed(layout.grid.axes):
        spans[axis] = (stride, size)
        stride *= size

    dims = [
        _joined([spans[axis] for axis in axes if spans[axis][1] > 1], n)
        for n, axes in zip(layout.shape, layout.split, strict=True)
    ]
    pinned = [(*spans[axis], coords) for axis, coords in layout.at if len(coords) < spans[axis][1]]
    return [dims, sorted(pinned)]


def _joined(spans: list[RankStride], n: int) -> list[RankStride]:
    if n % prod(size for _, size in spans):
        return spans
    out: list[RankStride] = []
    for stride, size in spans:
        if out and out[-1][0] == stride * size:
            out[-1] = (stride, out[-1][1] * size)
        else:
            out.append((stride, size))
    return out
