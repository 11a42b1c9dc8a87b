"""Layouts with several axes on a dim, as MindSpore's JSON form has them: each axis on a dim of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from math import prod

from launcher.checkpoint.mindspore.formats.strategy import Slicing


def collapsed(s: Slicing, shape: tuple[int, ...], *, sliced: bool) -> Slicing:
    """The layout in the dims of the real tensor; ``shape`` is that of it or, if ``sliced``, of one slice.

    Raises ``ValueError`` unless there is exactly one way.

    >>> collapsed(Slicing((2, 2), ((), (1,), (0,)), shape=(16, 2, 16)), (16, 32), sliced=False).dims
    ((), (1, 0))
    """
    if len(s.dims) == len(shape):
        return s
    found = []
    if s.shape is not None and len(s.shape) == len(s.dims):
        found = list(_ways(s, shape, sliced))
    if len(found) == 1:
        return found[0]
    problem = "in more than one way" if found else "in no way"
    told = f"the strategy has {len(s.dims)} dims, the tensor {list(shape)} has {len(shape)}"
    raise ValueError(f"{told}, and the ones fit the others {problem}")


def expanded(s: Slicing) -> Slicing:
    """The layout with one axis a dim, as that form wants it: the other way of ``collapsed``.

    Axes that are neighbours in the device matrix become one of it. Where none are, each has a dim of its own,
    which MindSpore writes so, though its own transforms refuse to read it.

    >>> expanded(Slicing((2, 2, 2), ((), (1, 0)), shape=(16, 32))).devices
    (2, 4)
    >>> expanded(Slicing((2, 2, 2), ((), (0, 1)), shape=(16, 32))).shape
    (16, 2, 16)
    """
    s = _merged(s)
    if all(len(dim) < 2 for dim in s.dims):
        return s
    assert s.shape is not None

    # a dim an axis, as long as the axis is; the last has the rest
    dims: list[tuple[int, ...]] = []
    shape: list[int] = []
    for dim, (n, axes) in enumerate(zip(s.shape, s.dims, strict=True)):
        *outer, _ = ways = [s.devices[-1 - axis] for axis in axes] or [1]
        dims += [(axis,) for axis in axes] or [()]
        shape += [*outer, n * ways[-1] // s.count(dim)]
    return replace(s, dims=tuple(dims), shape=tuple(shape), nested=False)


def _merged(s: Slicing) -> Slicing:
    """Without axes of size 1 on a dim of several, and neighbours on one dim as one axis."""
    dims = [tuple(a for a in dim if len(dim) < 2 or s.devices[-1 - a] > 1) for dim in s.dims]
    inner = {a for dim in dims for before, a in pairwise(dim) if before == a + 1}
    if not inner and not any(len(dim) > 1 for dim in s.dims):
        return s

    # outermost first: an axis takes in those right after it that follow it on its dim
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
    """A dim cut by several axes became as many dims; all but the last are as long as their axis is."""
    assert s.shape is not None
    for ends in combinations(range(1, len(s.dims)), len(shape) - 1):
        groups = [range(a, b) for a, b in zip((0, *ends), (*ends, len(s.dims)), strict=True)]
        real = tuple(prod(s.shape[d] for d in group) for group in groups)
        seen = tuple(n // prod(s.count(d) for d in group) for n, group in zip(real, groups, strict=True))
        found = seen if sliced else real
        if found == shape and all(_one(s, group) for group in groups):
            dims = tuple(tuple(axis for d in group for axis in s.dims[d]) for group in groups)
            yield replace(s, dims=dims, shape=real, nested=True)


def _one(s: Slicing, group: range) -> bool:
    assert s.shape is not None
    whole = all(s.shape[d] == s.count(d) for d in group[:-1])
    return len(group) == 1 or (whole and all(s.dims[d] for d in group))
