"""The order of samples: a function of the seed, the epoch and the position."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
ROUNDS = 8  # Luby and Rackoff: 4 resist queries in both directions; the others cost little


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Maps counters to uniform 64-bit numbers by splitmix64."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(places: Indices, n: int, seed: int, epoch: int) -> Indices:
    """Returns the elements at ``places`` of the permutation of ``n`` that ``seed`` and ``epoch`` choose.

    It is a Feistel network over a square of at least ``n`` numbers. A result of ``n`` or more goes through
    the network again until it is below ``n`` (cycle walking).

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
    """Maps the numbers below ``side * side`` one to one."""
    left, right = np.divmod(x, side)
    for key in keys:
        left, right = right, (left + mix(right ^ key) % side) % side
    return left * side + right


SORTED = 1 << 24
"""The most samples that are sorted. Sorting takes 24 bytes per sample and up to 5 seconds.

For more samples, no permutation is stored.
"""


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, n: int) -> Indices:
    """Returns the order of ``n`` samples in one epoch, as a read-only array.

    Samples are sorted by raw Philox output, which numpy promises never to change, unlike
    ``Generator.permutation``.
    """
    keys = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(n)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def batch_indices(seed: int, step: int, batch_size: int, n: int) -> Indices:
    """Returns the samples, out of ``n``, that optimizer step ``step`` (from 0) reads, in order.

    Epochs follow each other without a gap: a batch may span two. Every sample occurs once per epoch.

    >>> [batch_indices(0, step, 4, 6).tolist() for step in range(3)]
    [[1, 4, 5, 2], [0, 3, 2, 3], [1, 0, 4, 5]]
    """
    place = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(place, n)
    return np.concatenate([_at(offsets[epochs == e], n, seed, int(e)) for e in np.unique(epochs)])


def _at(places: Indices, n: int, seed: int, epoch: int) -> Indices:
    """Returns the samples at ``places`` of an epoch's order."""
    if n > SORTED:
        return permuted(places, n, seed, epoch)
    return permutation(seed, epoch, n)[places]


def in_epochs(seed: int, samples: int, step: int, batch_size: int, n: int) -> Indices:
    """Returns ``batch_indices`` with ``samples`` times the epoch added to each index.

    >>> [in_epochs(0, 6, step, 4, 6).tolist() for step in range(3)]
    [[1, 4, 5, 2], [0, 3, 8, 9], [7, 6, 10, 11]]
    """
    place = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    return batch_indices(seed, step, batch_size, n) + place // n * samples


def in_order(step: int, batch_size: int, n: int) -> Indices:
    """Returns the samples of a step in order, cycling through the first ``n``.

    >>> in_order(1, 4, 6).tolist()
    [4, 5, 0, 1]
    """
    return np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64) % n
