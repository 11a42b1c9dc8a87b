"""Rotary position embedding: one table of cosines and sines for all layers, and the rotation by it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

TABLES = 32
"""Number of cached tables per process: one per sequence length, or one per piece of a cut sequence."""

_LIBRARY = torch.library.Library("launcher", "DEF")
_LIBRARY.define(
    "rotary_table(SymInt start, SymInt time, int head, float theta, *, "
    "ScalarType dtype, Device device) -> Tensor"
)


def angles(time: int, head: int, theta: float, like: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every (position, pair of ``head`` dims) from position ``start`` on.

    They are computed in float64: an angle of thousands has few digits left in float32, which changes logits
    by 1e-4. They are returned in float64 for float64 inputs, else in float32. Do not change them in place:
    all layers read the same table.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        table = torch.ops.launcher.rotary_table(start, time, head, theta, dtype=dtype, device=like.device)
        cos, sin = table.unbind()
        return cos, sin
    if _watched(like):
        return _worked_out(start, time, head, theta, dtype=dtype, device=like.device)
    return _table(start, time, head, theta, dtype=dtype, device=like.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` (..., time, head): dim ``i`` pairs with ``i + head / 2``, as in Hugging Face's Llama."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _worked_out(
    start: int, time: int, head: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    place = torch.arange(start, start + time, device=device, dtype=torch.float64)
    pair = torch.arange(0, head, 2, device=device, dtype=torch.float64)
    angle = torch.outer(place, torch.pow(theta, -pair / head))
    return angle.cos().to(dtype), angle.sin().to(dtype)


@lru_cache(TABLES)
def _table(
    start: int, time: int, head: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute the table once; a backward may save it, also if it was first read without gradients."""
    with torch.inference_mode(False), torch.no_grad():
        return _worked_out(start, time, head, theta, dtype=dtype, device=device)


def _watched(like: Tensor) -> bool:
    """Whether ``like`` is traced or on meta: a table that is made then must not enter the cache."""
    return (
        type(like) is not Tensor
        or like.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


@torch.library.impl(_LIBRARY, "rotary_table", "CompositeExplicitAutograd")
def _of_graph(
    start: int, time: int, head: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The operation in a compiled graph, as otherwise the compiler inlines it in every kernel that reads it.

    It returns a copy, because the compiler may reuse the memory of tensors that a graph no longer needs.
    """
    made = _worked_out if device.type == "meta" else _table
    return torch.stack(made(start, time, head, theta, dtype=dtype, device=device))


def _shape(
    start: int, time: int, head: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty((2, time, head // 2), dtype=dtype, device=device)


torch.library.register_fake("launcher::rotary_table", _shape, lib=_LIBRARY)
