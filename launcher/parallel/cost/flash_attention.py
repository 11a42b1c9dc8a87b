"""Attention on meta tensors costs what the fused kernel costs: torch would form all scores there."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ATTENTION = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)


class Flash(TorchFunctionMode):
    """While entered, attention on meta tensors keeps for backward what it keeps on real devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = _fused(*args, **kwargs) if func in ATTENTION else None
        return func(*args, **kwargs) if out is None else out


def _fused(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor | None:
    """``None`` where real devices have no fused kernel either, and for what is not on meta."""
    # what the kernel takes
    if not all(_takes(t) for t in (q, k, v)) or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return None
    if dropout_p > 0 or more.get("enable_gqa"):
        return None
    if attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4)):
        return None

    # a mask of booleans becomes 0 or -inf to add, as torch does it
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: torch.Tensor
    out, _ = fused(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=more.get("scale"))
    return out


def _takes(t: Any) -> bool:
    """Whether it is on meta, with batch, heads, length and width."""
    return isinstance(t, torch.Tensor) and t.device.type == "meta" and t.dim() == 4
