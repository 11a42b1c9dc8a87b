"""Numbers that tell whether the bytes of tensors are the same, without a copy of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number of each tensor (int64, 1-d, on their device): of a CPU's a hash, of others a sum.

    The sum is that of the bytes as integers. The CPU does not wait for it.
    """
    if all(t.device.type == "cpu" for t in tensors):
        return torch.tensor([_hash(t) for t in tensors], dtype=torch.int64)
    return torch.stack([_integers(t).sum(dtype=torch.int64) for t in tensors])


def _hash(t: Tensor) -> int:
    raw = memoryview(_flat(t).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return xxhash.xxh3_64_intdigest(raw) - (1 << 63)


def _integers(t: Tensor) -> Tensor:
    return _flat(t).view(INTEGERS.get(t.element_size(), torch.uint8))


def _flat(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1)
