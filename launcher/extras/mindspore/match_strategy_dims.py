"""Matches the dims of a strategy with those of its tensor: a strategy may have one per axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from math import prod

from launcher.extras.mindspore.strategy import Slicing


def collapsed(s: Slicing, shape: tuple[int, ...], *, sliced: bool) -> Slicing:
    """Returns the layout with the dims of the real tensor, from one with a dim per axis.

    ``shape`` is the tensor's shape or, if ``sliced``, that of one slice. Raises ``ValueError`` unless there
    is exactly one way.

    >>> collapsed(Slicing((2, 2), ((), (1,), (0,)), shape=(16, 2, 16)), (16, 32), sliced=False).dims
    ((), (1, 0))
    """
    if len(s.dims) == len(shape):
        return s
    ways = []
    if s.shape is not None and len(s.shape) == len(s.dims):
        ways = list(_ways(s, shape, sliced))
    if len(ways) == 1:
        return ways[0]
    problem = "match in more than one way" if ways else "do not match"
    text = f"the strategy has {len(s.dims)} dims, the tensor {list(shape)} has {len(shape)}"
    raise ValueError(f"{text}, and they {problem}")


def expanded(s: Slicing) -> Slicing:
    """Returns the layout with at most one axis per dim, as the JSON format requires: ``collapsed`` reversed.

    Axes of a dim that are adjacent in the device matrix are merged to one. Axes that are not adjacent get a
    dim each; MindSpore writes this too, although its own transforms refuse to read it.

    >>> expanded(Slicing((2, 2, 2), ((), (1, 0)), shape=(16, 32))).devices
    (2, 4)
    >>> expanded(Slicing((2, 2, 2), ((), (0, 1)), shape=(16, 32))).shape
    (16, 2, 16)
    """
    s = _merged(s)
    if all(len(dim) < 2 for dim in s.dims):
        return s
    assert s.shape is not None

    # one dim per axis, of the axis's size; the last one has the remaining elements
    dims: list[tuple[int, ...]] = []
    shape: list[int] = []
    for dim, (n, axes) in enumerate(zip(s.shape, s.dims, strict=True)):
        *outer, _ = ways = [s.devices[-1 - axis] for axis in axes] or [1]
        dims += [(axis,) for axis in axes] or [()]
        shape += [*outer, n * ways[-1] // s.count(dim)]
    return replace(s, dims=tuple(dims), shape=tuple(shape), nested=False)


def _merged(s: Slicing) -> Slicing:
    """Merges adjacent axes of a dim to one axis; drops axes of size 1 from a dim with several axes."""
    dims = [tuple(a for a in dim if len(dim) < 2 or s.devices[-1 - a] > 1) for dim in s.dims]
    inner = {a for dim in dims for before, a in pairwise(dim) if before == a + 1}
    if not inner and not any(len(dim) > 1 for dim in s.dims):
        return s

    # outermost first: an axis absorbs the axes right after it that also follow it on its dim
    sizes: list[int] = []
    number: dict[int, int] = {}
    for axis in reversed(range(len(s.devices))):
        n = s.devices[-1 - axis]
        if axis in inner:
            sizes[-1] *= n
        else:
            number[axis] = len(sizes)
            sizes.append(n)
    last = len(sizes) - 1
    joined = tuple(tuple(last - number[a] for a in dim if a not in inner) for dim in dims)
    return replace(s, devices=tuple(sizes), dims=joined, nested=False)


def _ways(s: Slicing, shape: tuple[int, ...], sliced: bool) -> Iterator[Slicing]:
    """Yields the layouts in the dims of ``shape`` that ``s`` can come from.

    In ``s`` a dim that several axes cut is one dim per axis; each of these but the last has its axis's size.
    """
    assert s.shape is not None
    for ends in combinations(range(1, len(s.dims)), len(shape) - 1):
        groups = [range(a, b) for a, b in zip((0, *ends), (*ends, len(s.dims)), strict=True)]
        real = tuple(prod(s.shape[d] for d in group) for group in groups)
        slice_shape = tuple(
            n // prod(s.count(d) for d in group) for n, group in zip(real, groups, strict=True)
        )
        compared = slice_shape if sliced else real
        if compared == shape and all(_one(s, group) for group in groups):
            dims = tuple(tuple(axis for d in group for axis in s.dims[d]) for group in groups)
            yield replace(s, dims=dims, shape=real, nested=True)


def _one(s: Slicing, group: range) -> bool:
    """Returns true if the dims ``group`` can be one dim of the real tensor."""
    assert s.shape is not None
    complete = all(s.shape[d] == s.count(d) for d in group[:-1])
    return len(group) == 1 or (complete and all(s.dims[d] for d in group))
