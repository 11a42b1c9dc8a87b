"""Losses of an output that is cut over ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function

from launcher.job.schema.objective import CrossEntropy


class ClassShards(Protocol):
    """The ranks that each have an equal part of the last dim, in order."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def sum(self, x: Tensor) -> Tensor: ...
    def top(self, x: Tensor) -> Tensor: ...


class OverClasses(Function):
    """The sum of the losses over ranks that each have a part of the classes.

    The logits of one position are never all on one rank: only its maximum, its sums and its target's logit
    are communicated. A target that is not a class makes the loss NaN. torch would raise, but a check would
    wait for the GPU.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, parts: ClassShards, settings: CrossEntropy
    ) -> Tensor:
        # the column of the target class, if it is among this rank's
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
        logsumexp = logs + top
        if settings.z_loss:
            loss = loss + settings.z_loss * logsumexp.square()

        counted = target != settings.ignore_index
        known = (target >= 0) & (target < classes)
        ctx.save_for_backward(powers / total.unsqueeze(-1), here, column, counted, logsumexp)
        ctx.settings, ctx.classes = settings, classes
        return torch.where(counted, torch.where(known, loss, torch.nan), 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        share, here, column, counted, logsumexp = ctx.saved_tensors
        settings: CrossEntropy = ctx.settings
        if settings.z_loss:
            share = share * (1 + 2 * settings.z_loss * logsumexp).unsqueeze(-1)
        if settings.label_smoothing:
            share = share - settings.label_smoothing / ctx.classes
        meant = (settings.label_smoothing - 1) * here.to(share.dtype)
        share = share.scatter_add(-1, column, meant.unsqueeze(-1))
        return torch.where(counted.unsqueeze(-1), share * grad, 0), None, None, None


class OverParts(Function):
    """Sums the terms of all ranks on each rank; each rank gets the gradient of its own term."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, parts: ClassShards) -> Tensor:
        return parts.sum(term)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def summed(term: Tensor, parts: ClassShards) -> Tensor:
    out: Tensor = OverParts.apply(term, parts)  # type: ignore[no-untyped-call]
    return out
