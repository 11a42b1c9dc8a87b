"""Attention by torch's kernels, with grouped-query attention where the kernel supports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

WIDEST = 128
"""Largest head dim for which flash and cuDNN attention have a backward on every device that they run on."""


class _Planned:
    """State of ``grouped_heads``.

    ``grouped`` is a class attribute and no context variable, because torch puts context variables in no
    graph.
    """

    grouped = False


@contextmanager
def grouped_heads(there: bool) -> Iterator[None]:
    """Sets whether the device that meta tensors stand for has kernels for grouped-query attention."""
    before, _Planned.grouped = _Planned.grouped, there
    try:
        yield
    finally:
        _Planned.grouped = before


def attention(q: Tensor, k: Tensor, v: Tensor, group: int, seen: Tensor | None) -> Tensor:
    """Return the attention of tensors (batch, heads, time, head).

    Each head of ``k`` and ``v`` serves ``group`` heads of ``q``. ``seen`` masks the keys that each query
    sees; ``None`` is causal attention.
    """
    grouped = group > 1 and _reads_groups(q, seen)
    if group > 1 and not grouped:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=grouped)


def _reads_groups(q: Tensor, seen: Tensor | None) -> bool:
    """Whether the kernel that torch selects supports grouped-query attention.

    CUDA's flash and cuDNN kernels do, in bfloat16 (which devices too old for them do not have) and without a
    mask. CUDA's kernel for masks and float32 does not: torch would decompose attention. The CPU kernel does,
    but it sums gradients in another order, and saves no time.
    """
    if seen is not None or q.dtype != torch.bfloat16 or q.shape[-1] > WIDEST:
        return False
    if q.is_meta:
        return _Planned.grouped
    return q.is_cuda
