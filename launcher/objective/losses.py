"""The built-in losses: their sum over a part of a batch, and the count that the global mean divides by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

from launcher.errors import RunError
from launcher.job.schema.objectives import CrossEntropy
from launcher.objective.cross_entropy import PLAIN, Parts, cross_entropy


class Loss(Protocol):
    """A loss of a global batch: the sum over all samples, divided by the sum of their counts.

    So both must be additive over samples and, where sequences pass in pieces, over positions.
    """

    def __call__(self, output: Any, target: Tensor, parts: Parts | None = None) -> Tensor:
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

    def __call__(self, output: Tensor, target: Tensor, parts: Parts | None = None) -> Tensor:
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

    def __call__(self, output: Tensor, target: Tensor, parts: Parts | None = None) -> Tensor:
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
    def forward(ctx: Any, term: Tensor, parts: Parts) -> Tensor:
        return parts.sum(term)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _summed(term: Tensor, parts: Parts) -> Tensor:
    out: Tensor = _OverParts.apply(term, parts)  # type: ignore[no-untyped-call]
    return out
