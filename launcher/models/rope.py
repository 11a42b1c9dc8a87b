"""Rotary position embedding, worked out where it is used: nothing to store, shard or cast."""

from __future__ import annotations

import torch
from torch import Tensor


def angles(time: int, head: int, theta: float, like: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every (position, pair of ``head`` dims) from position ``start`` on.

    Worked out in float64: an angle of thousands has few digits left in float32, and logits are off by 1e-4
    for it. Returned in float64 for float64 inputs, else in float32.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    place = torch.arange(start, start + time, device=like.device, dtype=torch.float64)
    pair = torch.arange(0, head, 2, device=like.device, dtype=torch.float64)
    angle = torch.outer(place, torch.pow(theta, -pair / head))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` (..., time, head): dim ``i`` pairs with dim ``i + head / 2``, as in Hugging Face's Llama."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
