"""Checks that boxes tile a full tensor: that each element is in exactly one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from launcher.plan.values.layout import Box

STEPS = 32
"""The most visits per piece: a grid takes two per dim, slabs that end at different places any number."""


class _Uneven(Exception):
    pass


def untiled(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Returns why ``boxes`` do not tile a tensor of ``shape``; ``None`` if they do.

    >>> untiled((4,), [Box((0,), (2,)), Box((2,), (4,))]), untiled((4,), [Box((0,), (2,)), Box((1,), (3,))])
    (None, 'its pieces at [0] and [1] overlap')
    """
    whole = Box((0,) * len(shape), shape)
    full = [box for box in boxes if not box.empty]
    for box in full:
        if (box & whole) != box:
            return f"its piece from {list(box.lo)} to {list(box.hi)} lies outside of {list(shape)}"

    try:
        both = _overlap(full, 0, [STEPS * len(full)])
    except _Uneven:
        return f"its {len(full)} pieces are cut too unevenly: no grid looks like this"
    if both:
        return f"its pieces at {list(both[0].lo)} and {list(both[1].lo)} overlap"

    # boxes that do not overlap tile the tensor if they have as many elements as it
    if sum(prod(box.shape) for box in full) != prod(shape):
        return f"its pieces do not add up to {list(shape)}"
    return None


def _overlap(boxes: Sequence[Box], dim: int, left: list[int]) -> tuple[Box, Box] | None:
    """Returns two boxes that share an element, or ``None``.

    The edges along ``dim`` make slabs; within each slab, boxes are compared along the dims after it. ``left``
    holds how many visits of boxes remain; beyond that ``_Uneven`` is raised.
    """
    left[0] -= len(boxes)
    if len(boxes) < 2:
        return None
    if left[0] < 0:
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
        left[0] -= len(open_boxes) // 8  # these visits are cheap
        found = _overlap(open_boxes, dim + 1, left) if starts[a] else None
        if found:
            return found
    return None
