"""The random streams of Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def streams_now() -> tuple[Any, ...]:
    """Returns the states of the random streams of Python and numpy."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(keys)), *rest


@contextmanager
def streams_kept() -> Iterator[None]:
    """Restores the random streams of Python and numpy on exit."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
