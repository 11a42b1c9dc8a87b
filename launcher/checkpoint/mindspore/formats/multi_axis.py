"""Layouts with several axes on a dim, as MindSpore's JSON form has them: each axis on a dim of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
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
