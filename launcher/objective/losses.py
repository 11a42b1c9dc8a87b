"""The losses that have a name: their sum over a part of a batch, and what the global mean divides it by."""

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
    """Sums over all samples of a global batch, divided by the sum of their counts, are its loss.

    So both must add up, over samples and, where sequences pass in pieces, over positions.
    """

    def __call__(self, output: Any, target: Tensor, parts: Parts | None = None) -> Tensor:
        """The sum over these samples, 0-d; ``parts``: ``output`` has this rank's part of its last dim."""

    def count(self, target: Tensor) -> Tensor:
        """What these samples count, 0-d float64: known before any forward, of the targets alone."""

    def problem(self) -> str:
        """Why the last sums are NaN, where the loss itself knows; else nothing. Waits for the device."""


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
    """A term an element: ``binary`` cross entropy of a logit, or the squared error.

    Worked out in float32 for outputs of half precision, else in their own dtype.
    """

    binary: bool

    def __call__(self, output: Tensor, target: Tensor, parts: Parts | None = None) -> Tensor:
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        target = target.to(wide.dtype)
        if parts is not None:
            target = target.narrow(-1, parts.rank * wide.shape[-1], wide.shape[-1])
        if wide.shape != target.shape:  # torch would stretch one to the other
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
    """The sum of the terms of all ranks, on each; each has the gradient of its own term."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, parts: Parts) -> Tensor:
        return parts.sum(term)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _summed(term: Tensor, parts: Parts) -> Tensor:
    out: Tensor = _OverParts.apply(term, parts)  # type: ignore[no-untyped-call]
    return out
