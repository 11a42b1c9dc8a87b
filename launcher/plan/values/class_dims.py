"""The dim of an output that holds the classes."""

from __future__ import annotations

from collections.abc import Sequence

IGNORED = -100
"""A target that the loss ignores: torch's default ``ignore_index``."""


def class_dims(output: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """Returns the dims of ``output`` that may hold the classes for targets of shape ``target``, best first.

    The result is empty if the two shapes do not fit.

    >>> class_dims((8, 10), (8,)), class_dims((8, 16, 100), (8, 16)), class_dims((8, 4, 6, 5), (8, 6, 5))
    ((1,), (2,), (1,))

    If two dims have the same size, either may hold the classes:

    >>> class_dims((8, 5, 5), (8, 5)), class_dims((8, 16, 100), (8,))
    ((2, 1), ())
    """
    last = len(output) - 1
    dims = (last,) if last <= 1 else (last, 1)
    return tuple(d for d in dims if d > 0 and (*output[:d], *output[d + 1 :]) == tuple(target))
