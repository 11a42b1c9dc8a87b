"""Losses as sums and denominators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

from launcher.errors import RunError
from launcher.job.schema.objective import CrossEntropy
from launcher.plan.values.class_dims import class_dims

PLAIN = CrossEntropy()


class ClassShards(Protocol):
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
    parts: ClassShards | None = None,
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
        loss = _OverClasses.apply(wide, target, parts, settings)  # type: ignore[no-untyped-call]
    return loss if reduction == "sum" else loss / counted.sum()


def flat(output: Tensor, target: Tensor, parts: ClassShards | None) -> tuple[Tensor, Tensor]:
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


class _OverClasses(Function):
    """The sum of the losses over ranks that each have a part of the classes.

    The logits of one position are never all on one rank: only its maximum, its sums and its target's logit
    are communicated. A target that is no class of any rank makes the loss NaN, where torch would raise,
    because a check would wait for the GPU.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, parts: ClassShards, settings: CrossEntropy
    ) -> Tensor:
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


class Loss(Protocol):
    """A loss of a global batch: the sum over all samples, divided by the sum of their counts.

    So both must be additive over samples and, where sequences pass in pieces, over positions.
    """

    def __call__(self, output: Any, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        """Return the sum over these samples, 0-d.

        With ``parts``, ``output`` has only this rank's part of its last dim.
        """

    def count(self, target: Tensor) -> Tensor:
        """Return the count of these samples, 0-d float64, from the targets alone.

        It is known before any forward.
        """

    def problem(self) -> str:
        """Return why the last sums are NaN, or "" if the loss does not know. Waits for the device."""


@dataclass(frozen=True)
class ClassLoss:
    """Cross entropy."""

    settings: CrossEntropy = PLAIN

    def __call__(self, output: Tensor, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        return cross_entropy(output, target, parts, "sum", self.settings)

    def count(self, target: Tensor) -> Tensor:
        return (target != self.settings.ignore_index).sum(dtype=torch.float64)

    def problem(self) -> str:
        return ""


@dataclass(frozen=True)
class ElementLoss:
    """A loss with one term per element: ``binary`` cross entropy of a logit, or the squared error.

    It is computed in float32 for half-precision outputs, else in their own dtype.
    """

    binary: bool

    def __call__(self, output: Tensor, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        target = target.to(wide.dtype)
        if parts is not None:
            target = target.narrow(-1, parts.rank * wide.shape[-1], wide.shape[-1])
        if wide.shape != target.shape:  # torch would broadcast them
            shapes = f"targets of shape {tuple(target.shape)} and an output of shape {tuple(output.shape)}"
            raise RunError(f"{shapes}: the loss compares element with element")

        if self.binary:
            term = F.binary_cross_entropy_with_logits(wide, target, reduction="sum")
        else:
            term = F.mse_loss(wide, target, reduction="sum")
        return term if parts is None else _summed(term, parts)

    def count(self, target: Tensor) -> Tensor:
        return torch.tensor(target.numel(), dtype=torch.float64, device=target.device)

    def problem(self) -> str:
        return ""


class _OverParts(Function):
    """Sums the terms of all ranks on each rank; each rank gets the gradient of its own term."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, parts: ClassShards) -> Tensor:
        return parts.sum(term)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _summed(term: Tensor, parts: ClassShards) -> Tensor:
    out: Tensor = _OverParts.apply(term, parts)  # type: ignore[no-untyped-call]
    return out


Output: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def formed(output: Any, keys: Sequence[str | int]) -> Output:
    """Return tensors in the order of ``keys`` as the model's tuple or dict; without keys, the one tensor."""
    if not keys:
        assert isinstance(output, Tensor)
        return output
    if all(isinstance(key, int) for key in keys):
        return tuple(output)
    return {str(key): t for key, t in zip(keys, output, strict=True)}


def tensors(output: Output) -> tuple[Tensor, ...]:
    if isinstance(output, Tensor):
        return (output,)
    return tuple(output.values()) if isinstance(output, dict) else output


def each(output: Output, change: Callable[[Tensor], Tensor]) -> Output:
    """Return ``output`` with ``change`` applied to every tensor."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):
        return {key: change(value) for key, value in output.items()}
    return tuple(map(change, output))


def at_least_float32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t


def float64(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t
