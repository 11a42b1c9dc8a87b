"""Cross entropy of full logits, and of logits whose classes are split over ranks."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

from launcher.errors import RunError
from launcher.job.schema.objectives import CrossEntropy
from launcher.plan.values.facts import class_dims

PLAIN = CrossEntropy()


class Parts(Protocol):
    """The ranks that each have an equal part of the last dim, in order."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def sum(self, x: Tensor) -> Tensor: ...
    def top(self, x: Tensor) -> Tensor: ...


def cross_entropy(
    output: Tensor,
    target: Tensor,
    parts: Parts | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    settings: CrossEntropy = PLAIN,
) -> Tensor:
    """Mean or sum over all counted positions, in nats, of logits against class numbers (samples, ...).

    Logits are (samples, ..., classes), or (samples, classes, ...) as in torch; if both fit, the first.

    The loss is computed in float32 for half-precision logits, else in their own dtype. With ``parts``,
    ``output`` has this rank's classes only, and every rank gets the full loss. If nothing counts, the sum and
    its gradients are zero. Raises ``RunError`` if the shape of ``target`` does not fit.
    """
    wide, target = flat(output, target, parts)
    counted = target != settings.ignore_index
    if parts is None:
        loss = F.cross_entropy(
            wide,
            target,
            ignore_index=settings.ignore_index,
            reduction="sum",
            label_smoothing=settings.label_smoothing,
        )
        if settings.z_loss:
            logs = torch.where(counted, wide.logsumexp(1), 0)
            loss = loss + settings.z_loss * logs.square().sum()
    else:
        loss = _OverParts.apply(wide, target, parts, settings)  # type: ignore[no-untyped-call]
    return loss if reduction == "sum" else loss / counted.sum()


def flat(output: Tensor, target: Tensor, parts: Parts | None) -> tuple[Tensor, Tensor]:
    """Return logits in float32 at least, and class numbers.

    Logits are (positions, classes) if classes are the last dim. Raises ``RunError`` if the shapes do not fit.
    """
    dims = class_dims(output.shape, target.shape)
    if not dims or (parts is not None and dims[0] != output.dim() - 1):
        shapes = f"targets of shape {tuple(target.shape)} do not fit an output of shape {tuple(output.shape)}"
        raise RunError(shapes)

    # torch takes classes as dim 1; if they are the last dim, positions become one dim
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    if dims[0] != output.dim() - 1:
        return wide, target.long()
    return wide.flatten(0, -2), target.flatten().long()


class _OverParts(Function):
    """The sum of the losses over ranks that each have a part of the classes.

    The logits of one position are never all on one rank: only its maximum, its sums and its target's logit
    are communicated. A target that is no class of any rank makes the loss NaN, where torch would raise,
    because a check would wait for the GPU.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, parts: Parts, settings: CrossEntropy) -> Tensor:
        # of the target class, if it is among this rank's
        classes = parts.size * logits.shape[-1]
        low = parts.rank * logits.shape[-1]
        here = (target >= low) & (target < low + logits.shape[-1])
        column = torch.where(here, target - low, 0).unsqueeze(-1)

        # sums over all ranks, of logits minus the largest one
        top = parts.top(logits.amax(-1))
        shifted = logits - top.unsqueeze(-1)
        powers = shifted.exp()
        mine = [powers.sum(-1), torch.where(here, shifted.gather(-1, column).squeeze(-1), 0)]
        mine += [shifted.sum(-1)] if settings.label_smoothing else []
        total, meant, *every = parts.sum(torch.stack(mine))

        # label smoothing spreads a part of the target evenly over all classes
        logs = total.log()
        loss = logs - (1 - settings.label_smoothing) * meant
        if every:
            loss = loss - settings.label_smoothing / classes * every[0]
        whole = logs + top
        if settings.z_loss:
            loss = loss + settings.z_loss * whole.square()

        counted = target != settings.ignore_index
        known = (target >= 0) & (target < classes)
        ctx.save_for_backward(powers / total.unsqueeze(-1), here, column, counted, whole)
        ctx.settings, ctx.classes = settings, classes
        return torch.where(counted, torch.where(known, loss, torch.nan), 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        share, here, column, counted, whole = ctx.saved_tensors
        settings: CrossEntropy = ctx.settings
        if settings.z_loss:
            share = share * (1 + 2 * settings.z_loss * whole).unsqueeze(-1)
        if settings.label_smoothing:
            share = share - settings.label_smoothing / ctx.classes
        meant = (settings.label_smoothing - 1) * here.to(share.dtype)
        share = share.scatter_add(-1, column, meant.unsqueeze(-1))
        return torch.where(counted.unsqueeze(-1), share * grad, 0), None, None, None
