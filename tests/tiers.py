"""How much is tried: in ``make test`` what takes minutes together, in ``make test-all`` all there is.

Of a large matrix both the first and ``make test-long`` try a part; of a test that takes long (``tests/long.txt``) the
first tries one case, or none where one alone takes too long, and ``make test-long`` the others. CI runs the first and,
with ``make test-turn``, a part of the second (``tests/turns.py``).
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
"""A test of which ``make test`` has a smaller one."""


def some(cases: Iterable[T], one_in: int = 4) -> list[T]:
    """Of ``cases`` one in so many, drawn once and for all and in their order; always the first and the last."""
    every = list(cases)
    if ALL or len(every) <= 2:
        return every
    drawn = random.Random(len(every)).sample(range(1, len(every) - 1), max(0, len(every) // one_in - 2))
    return [case for n, case in enumerate(every) if n in {0, *drawn, len(every) - 1}]


def some_of(cases: Mapping[K, V], one_in: int = 4) -> dict[K, V]:
    """The same of a mapping."""
    return {key: cases[key] for key in some(cases, one_in)}
