"""Attention on meta tensors keeps for backward what it keeps on this machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.parallel.cost.forward_cost import Meter

MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "bool": lambda: torch.ones(40, 64, dtype=torch.bool),
    "bool of each sample": lambda: torch.ones(2, 1, 40, 64, dtype=torch.bool),
    "added": lambda: torch.zeros(40, 64),
    "of 3 dims, which no fused kernel takes": lambda: torch.zeros(4, 40, 64),
    "trained, which none takes either": lambda: torch.zeros(40, 64, requires_grad=True),
}


def saved(device: str, mask: Callable[[], Tensor | None]) -> int:
    """Bytes of attention from 40 positions to 64."""
    with torch.device(device):
        q, k, v = (torch.zeros(2, 4, n, 8, requires_grad=True) for n in (40, 64, 64))
        with Meter(()) as meter:
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask())
    return meter.saved


@pytest.mark.parametrize("mask", MASKS)
def test_as_many_bytes_are_saved_on_meta_as_on_a_cpu(mask):
    assert saved("meta", MASKS[mask]) == saved("cpu", MASKS[mask])
