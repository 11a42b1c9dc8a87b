"""Digests that tell whether the bytes of tensors have changed, without keeping a copy of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import xxhash
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
COLUMNS = 1021
"""A prime, so that rows of a tensor that are swapped fall into other columns, whatever their length."""


@torch.no_grad()
def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Returns one digest per tensor (int64, 1-d, on their device); it depends on the bytes and their order.

    On a CPU a digest is a hash. On other devices it is a sum, for which the CPU does not wait.
    """
    if all(t.device.type == "cpu" for t in tensors):
        return torch.tensor([_hash(t) for t in tensors], dtype=torch.int64)
    return weighted_sums(tensors)


def weighted_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Returns for each tensor the sum of its numbers as integers, each times the weight of its position."""
    columns = torch.stack([_columns(_integers(t)) for t in tensors])
    return (columns * _weights(columns.device)).sum(1)


@cache
def _weights(device: torch.device) -> Tensor:
    """Returns a random weight for each column, the same in every process.

    With consecutive weights, such as 1, 2, 3, changes of several numbers would often cancel each other.
    """
    draws = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (COLUMNS,), generator=draws).to(device)


def _columns(numbers: Tensor) -> Tensor:
    """Returns the sum of each column of ``numbers`` in rows of ``COLUMNS``; the last row may be shorter."""
    rest = len(numbers) % COLUMNS
    out = numbers[: len(numbers) - rest].view(-1, COLUMNS).sum(0, dtype=torch.int64)
    out[:rest] += numbers[len(numbers) - rest :]
    return out


def _hash(t: Tensor) -> int:
    raw = memoryview(_flat(t).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return xxhash.xxh3_64_intdigest(raw) - (1 << 63)


def _integers(t: Tensor) -> Tensor:
    return _flat(t).view(INTEGERS.get(t.element_size(), torch.uint8))


def _flat(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1)
