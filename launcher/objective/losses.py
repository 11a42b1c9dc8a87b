"""Losses as sums and denominators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.errors import RunError
from launcher.job.schema.objective import CrossEntropy
from launcher.objective.losses_over_ranks import ClassShards, OverClasses, summed
from launcher.plan.values.class_dims import class_dims

PLAIN = CrossEntropy()


def cross_entropy(
    output: Tensor,
    target: Tensor,
    parts: ClassShards | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    settings: CrossEntropy = PLAIN,
) -> Tensor:
    """Returns the mean or sum over all counted positions, in nats; targets are class numbers (samples, ...).

    Logits are (samples, ..., classes), or (samples, classes, ...) as in torch; if both fit, the first form is
    assumed.

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
        loss = OverClasses.apply(wide, target, parts, settings)  # type: ignore[no-untyped-call]
    return loss if reduction == "sum" else loss / counted.sum()


def flat(output: Tensor, target: Tensor, parts: ClassShards | None) -> tuple[Tensor, Tensor]:
    """Returns logits in float32 at least, and class numbers.

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


class Loss(Protocol):
    """A loss of a global batch: the sum over all samples, divided by the sum of their counts.

    Sums and counts must be additive over samples and, if sequences pass in pieces, over positions.
    """

    def __call__(self, output: Any, target: Tensor, parts: ClassShards | None = None) -> Tensor:
        """Returns the sum over these samples, 0-d.

        With ``parts``, ``output`` has only this rank's part of its last dim.
        """

    def count(self, target: Tensor) -> Tensor:
        """Returns the count of these samples, 0-d float64, from the targets alone.

        It is known before any forward.
        """

    def problem(self) -> str:
        """Returns why the last sums are NaN, or "" if the loss does not know. Waits for the device."""


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
            shapes = f"targets of shape {tuple(target.shape)} do not fit an output of shape"
            raise RunError(f"{shapes} {tuple(output.shape)}: the loss compares element with element")

        if self.binary:
            term = F.binary_cross_entropy_with_logits(wide, target, reduction="sum")
        else:
            term = F.mse_loss(wide, target, reduction="sum")
        return term if parts is None else summed(term, parts)

    def count(self, target: Tensor) -> Tensor:
        return torch.tensor(target.numel(), dtype=torch.float64, device=target.device)

    def problem(self) -> str:
        return ""


def at_least_float32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t


def float64(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t
