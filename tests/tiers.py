"""How much is tested: ``make test`` takes minutes, ``make test-all`` tries everything.

Both ``make test`` and ``make test-long`` try a part of each large matrix. If a test takes long (``tests/long.txt``),
the first tries one of its cases, or none if even one takes too long; the second tries the others. CI runs the first
and, with ``make test-turn``, a part of the second (``tests/turns.py``).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping
from typing import TypeVar

import pytest

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
ALL, QUICK, LONG, TURN = (os.environ.get("TESTS") == tier for tier in ("all", "quick", "long", "turn"))
exhaustive = pytest.mark.exhaustive
"""Marks a test that has a smaller version in ``make test``."""


def some(cases: Iterable[T], one_in: int = 4) -> list[T]:
    """Return one in ``one_in`` of ``cases``, in their order.

    The choice is always the same, and includes the first and the last case.
    """
    every = list(cases)
    if ALL or len(every) <= 2:
        return every
    drawn = random.Random(len(every)).sample(range(1, len(every) - 1), max(0, len(every) // one_in - 2))
    return [case for n, case in enumerate(every) if n in {0, *drawn, len(every) - 1}]


def some_of(cases: Mapping[K, V], one_in: int = 4) -> dict[K, V]:
    """Return the same for a mapping."""
    return {key: cases[key] for key in some(cases, one_in)}
