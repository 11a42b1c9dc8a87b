"""The training loss."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

from launcher.errors import RunError
from launcher.plan.values.facts import IGNORED, class_dims


class Parts(Protocol):
    """Ranks that each have a part of the classes, of equal size, in order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def sum(self, x: Tensor) -> Tensor: ...
    def top(self, x: Tensor) -> Tensor: ...


def cross_entropy(
    output: Tensor, target: Tensor, parts: Parts | None = None, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """Mean or sum over all positions that count, in nats, of logits against class numbers (samples, ...).

    Logits are (samples, ..., classes), or as torch has it (samples, classes, ...); where both fit, the first.

    Worked out in float32 for half-precision logits, else in their own dtype. With ``parts``, ``output`` has
    this rank's classes only, and every rank gets the whole loss. Where nothing counts, the sum and its
    gradients are zero. Raises ``RunError`` for targets of another shape.
    """
    dims = class_dims(output.shape, target.shape)
    if not dims or (parts is not None and dims[0] != output.dim() - 1):
        shapes = f"targets of shape {tuple(target.shape)} do not fit an output of shape {tuple(output.shape)}"
        raise RunError(shapes)

    # classes as dim 1 are torch's own case; as the last, positions become one dim
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    if dims[0] != output.dim() - 1:
        return F.cross_entropy(wide, target.long(), ignore_index=IGNORED, reduction=reduction)
    flat, target = wide.flatten(0, -2), target.flatten().long()
    if parts is None:
        return F.cross_entropy(flat, target, ignore_index=IGNORED, reduction=reduction)
    loss: Tensor = _OverParts.apply(flat, target, parts)  # type: ignore[no-untyped-call]
    return loss if reduction == "sum" else loss / (target != IGNORED).sum()


class _OverParts(Function):
    """The sum of the losses.

    The logits of one position are never all on one rank: only its largest, its sum and its target's
    travel. A target that is no class of any rank makes the loss NaN, where torch would raise: nobody
    waits for a GPU to know.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, parts: Parts) -> Tensor:
        low = parts.rank * logits.shape[-1]
        here = (target >= low) & (target < low + logits.shape[-1])
        column = torch.where(here, target - low, 0).unsqueeze(-1)
        shifted = logits - parts.top(logits.amax(-1)).unsqueeze(-1)
        powers = shifted.exp()
        mine = torch.where(here, shifted.gather(-1, column).squeeze(-1), 0)
        total, meant = parts.sum(torch.stack((powers.sum(-1), mine)))
        counted = target != IGNORED
        ctx.save_for_backward(powers / total.unsqueeze(-1), here, column, counted)
        known = (target >= 0) & (target < parts.size * logits.shape[-1])
        return torch.where(counted, torch.where(known, total.log() - meant, torch.nan), 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        share, here, column, counted = ctx.saved_tensors
        share = share.scatter_add(-1, column, -here.to(share.dtype).unsqueeze(-1))
        return torch.where(counted.unsqueeze(-1), share * grad, 0), None, None
