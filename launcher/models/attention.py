"""Attention by torch's kernels, of which some read keys and values of fewer heads than queries have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

WIDEST = 128
"""Numbers a head: up to here flash and cuDNN have their backward on every device that they run on."""


class _Planned:
    """``grouped``: as ``grouped_heads`` has said; no context variable, which torch puts in no graph."""

    grouped = False


@contextmanager
def grouped_heads(there: bool) -> Iterator[None]:
    """Whether the device that tensors on meta stand for has kernels that read groups of heads."""
    before, _Planned.grouped = _Planned.grouped, there
    try:
        yield
    finally:
        _Planned.grouped = before


def attention(q: Tensor, k: Tensor, v: Tensor, group: int, seen: Tensor | None) -> Tensor:
    """Of (batch, heads, time, head); each head of ``k`` and ``v`` is that of ``group`` heads of ``q``.

    ``seen``: which keys each query sees; ``None`` for all that come before.
    """
    grouped = group > 1 and _reads_groups(q, seen)
    if group > 1 and not grouped:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=grouped)


def _reads_groups(q: Tensor, seen: Tensor | None) -> bool:
    """Whether the kernel that torch takes reads each head of keys for a group of queries.

    CUDA's flash and cuDNN do, in bfloat16 (which older devices than they run on have not) and without a mask.
    Its kernel for masks and float32 does not: torch would take attention to pieces. A CPU's does, but sums
    gradients in another order, for no gain in time.
    """
    if seen is not None or q.dtype != torch.bfloat16 or q.shape[-1] > WIDEST:
        return False
    if q.is_meta:
        return _Planned.grouped
    return q.is_cuda
