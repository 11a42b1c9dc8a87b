"""Selects the samples of an optimizer step: a pure function of the seed, whatever the layout."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from launcher.data.feistel import permuted

Indices = NDArray[np.int64]
SORTED = 1 << 24
"""The most samples that are sorted, which takes 24 bytes each and up to 5 seconds.

For more, no permutation is stored.
"""


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, n: int) -> Indices:
    """The order of ``n`` samples in one epoch; read-only.

    Sorted by raw Philox output, which numpy promises never to change, unlike ``Generator.permutation``.
    """
    keys = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(n)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def batch_indices(seed: int, step: int, batch_size: int, n: int) -> Indices:
    """The samples, out of ``n``, that optimizer step ``step`` (from 0) reads, in order.

    Epochs follow each other without a gap: a batch may span two. Every sample occurs once per epoch.

    >>> [batch_indices(0, step, 4, 6).tolist() for step in range(3)]
    [[1, 4, 5, 2], [0, 3, 2, 3], [1, 0, 4, 5]]
    """
    place = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(place, n)
    return np.concatenate([_at(offsets[epochs == e], n, seed, int(e)) for e in np.unique(epochs)])


def _at(places: Indices, n: int, seed: int, epoch: int) -> Indices:
    """The samples at ``places`` of an epoch's order."""
    if n > SORTED:
        return permuted(places, n, seed, epoch)
    return permutation(seed, epoch, n)[places]


def in_epochs(seed: int, samples: int, step: int, batch_size: int, n: int) -> Indices:
    """Like ``batch_indices``, but adds ``samples`` times the epoch to each index.

    >>> [in_epochs(0, 6, step, 4, 6).tolist() for step in range(3)]
    [[1, 4, 5, 2], [0, 3, 8, 9], [7, 6, 10, 11]]
    """
    place = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    return batch_indices(seed, step, batch_size, n) + place // n * samples


def in_order(step: int, batch_size: int, n: int) -> Indices:
    """Samples in order, cycling through the first ``n``.

    >>> in_order(1, 4, 6).tolist()
    [4, 5, 0, 1]
    """
    return np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64) % n
