"""A permutation of any number of samples, computed element by element without a table."""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
ROUNDS = 8  # Luby and Rackoff: 4 resist queries in both directions; the others cost little


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64: counters in, uniform 64-bit numbers out."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(places: Indices, n: int, seed: int, epoch: int) -> Indices:
    """The elements at ``places`` of the permutation of ``n`` that ``seed`` and ``epoch`` choose.

    A Feistel network over a square of at least ``n`` numbers. A result of ``n`` or more goes through it again
    until it is below ``n`` (cycle walking).

    >>> sorted(permuted(np.arange(10), 10, seed=0, epoch=0).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    side = np.uint64(isqrt(max(n - 1, 0)) + 1)
    keys = (
        np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    )
    out = _network(places.astype(np.uint64), side, keys)
    while (beyond := out >= n).any():
        out[beyond] = _network(out[beyond], side, keys)
    return out.astype(np.int64)


def _network(x: NDArray[np.uint64], side: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection on the numbers below ``side * side``."""
    left, right = np.divmod(x, side)
    for key in keys:
        left, right = right, (left + mix(right ^ key) % side) % side
    return left * side + right
