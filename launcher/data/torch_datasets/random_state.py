"""Seeds the global random generators by a key, for code that draws from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

Seed = Callable[..., None]


@contextmanager
def global_generators() -> Iterator[Seed]:
    """Yields a function that seeds Python, numpy and torch (CPU) by a key; restores their state after it."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield _seed
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _seed(seed: int, *key: int) -> None:
    words = np.random.SeedSequence(seed, spawn_key=key).generate_state(2, np.uint32)
    first, second = words.tolist()
    random.seed(first << 32 | second)
    np.random.seed(first)
    torch.default_generator.manual_seed(first << 31 | second >> 1)  # not those of other devices
