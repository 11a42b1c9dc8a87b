"""The order of samples, computed a second time."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def order(seed: int, step: int, batch: int, n: int) -> Indices:
    """Returns the indices, out of ``n`` samples, of optimizer step ``step`` (from 0).

    Epochs follow each other without a gap. An epoch is the samples sorted by the raw output of a Philox
    generator whose seed sequence is that of ``seed``, spawned by the number of the epoch.
    """
    places = range(step * batch, (step + 1) * batch)
    return np.array([_epoch(seed, place // n, n)[place % n] for place in places], dtype=np.int64)


def dataset_indices(reading: str, seed: int, step: int, batch: int, n: int) -> Indices:
    """Returns the indices passed to a data set: in epochs, sample ``i`` of epoch ``e`` is ``e * n + i``."""
    places = [*range(step * batch, (step + 1) * batch)]
    if reading == "in order":
        return np.array(places, dtype=np.int64)
    again = [place // n * n for place in places] if reading == "in epochs" else 0
    return order(seed, step, batch, n) + np.array(again, dtype=np.int64)


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, n: int) -> Indices:
    stream = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.lexsort((np.arange(n), stream.random_raw(n))).astype(np.int64)
