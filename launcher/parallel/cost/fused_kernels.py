"""Costs attention and norms on meta tensors as fused kernels, because torch decomposes them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ATTENTION = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
RMS_NORM = (F.rms_norm, torch.rms_norm, torch.ops.aten.rms_norm.default)


@dataclass(frozen=True)
class Fused:
    """Says which fused kernels the planned device has: ``attention``, and ``norms`` (RMSNorm).

    ``wide``: its attention supports dropout, and fewer key and value heads than query heads, as CUDA's does.
    """

    attention: bool = True
    norms: bool = False
    wide: bool = False


CPU = Fused()
_fused = ContextVar("fused", default=CPU)


@contextmanager
def counted_as(fused: Fused) -> Iterator[None]:
    """Count operations as a device that has the kernels ``fused``."""
    before = _fused.set(fused)
    try:
        yield
    finally:
        _fused.reset(before)


class FusedKernels(TorchFunctionMode):
    """While entered, fused operations on meta tensors save for backward what they save on devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = None
        fused = _fused.get()
        if func in ATTENTION and fused.attention:
            out = _attention(*args, **kwargs)
        elif func in RMS_NORM and fused.norms:
            out = _rms_norm(*args, **kwargs)
        return func(*args, **kwargs) if out is None else out


def _rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> torch.Tensor | None:
    """Use the kernel of LayerNorm, which reads and saves as much, except for one mean per row.

    ``None`` for a weight of another dtype, where CUDA decomposes the norm too, and for tensors that are not
    on meta.
    """
    if not isinstance(input, torch.Tensor) or input.device.type != "meta":
        return None
    if weight is not None and weight.dtype != input.dtype:
        return None
    out: torch.Tensor
    out, _, _ = torch.native_layer_norm(input, normalized_shape, weight, None, eps or 1e-6)
    return out


def _attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor | None:
    """Return ``None`` if real devices have no fused kernel either, or the tensors are not on meta."""
    # what the kernel supports
    if not all(_takes(t) for t in (q, k, v)) or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return None
    if not _fused.get().wide and (dropout_p > 0 or more.get("enable_gqa")):
        return None
    if attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4)):
        return None

    # a boolean mask becomes 0 or -inf to add, as in torch
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: torch.Tensor
    out, _ = fused(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=more.get("scale"))
    return out


def _takes(t: Any) -> bool:
    """Whether ``t`` is on meta and has dims batch, heads, length and width."""
    return isinstance(t, torch.Tensor) and t.device.type == "meta" and t.dim() == 4
