"""Checks that all ranks have the same data."""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from launcher.data.source import Dataset
from launcher.errors import RunError
from launcher.runtime.cluster.messages import all_gather


def check(data: Dataset) -> None:
    """Raises ``RunError`` on every rank if lengths or the first samples differ. All ranks call it."""
    mine = len(data.train), len(data.val), _first(data)
    every = all_gather(mine, tuple[int, int, str])
    other = next((rank for rank, theirs in enumerate(every) if theirs != every[0]), None)
    if other is None:
        return
    (train, val, _), (their_train, their_val, _) = every[0], every[other]
    text = "its first sample differs"
    if (train, val) != (their_train, their_val):
        text = f"it has {their_train} training and {their_val} held-out samples, rank 0 has {train} and {val}"
    why = "every rank must open all samples: the launcher divides them; do not split the data by rank"
    raise RunError(f"rank {other} has other data than rank 0: {text}; {why}")


def _first(data: Dataset) -> str:
    """Returns a 128-bit hash of the first sample's values."""
    hasher, row = xxhash.xxh3_128(), np.arange(1)
    for t in (*data.train.inputs(row), data.train.targets(row)):
        hasher.update(f"{t.dtype} {tuple(t.shape)}".encode())
        hasher.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
