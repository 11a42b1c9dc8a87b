"""Collectives inside of operators over the ranks of a stage, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Collectives(Protocol):
    """Collectives over the ranks that differ from this one along ``axes`` of a device ``matrix`` only."""

    def sum(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        """Return a new tensor on each of these ranks: the sum over them."""

    def max(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        """Return a new tensor on each of these ranks: the maximum over them."""


@dataclass(frozen=True)
class Meeting:
    """The ranks that communicate inside of an operator."""

    here: Collectives
    matrix: tuple[int, ...]
    axes: tuple[int, ...]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum, without a gradient."""
        return self.here.sum(x.contiguous(), self.matrix, self.axes) if self.axes else x

    def max(self, x: Tensor) -> Tensor:
        """Return the maximum, without a gradient."""
        return self.here.max(x.contiguous(), self.matrix, self.axes) if self.axes else x

    def sum_for_all(self, x: Tensor) -> Tensor:
        """Return a sum from which each rank computes the same: its gradient is that of each term."""
        if not self.axes:
            return x
        return _SumForAll.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _SumForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: Meeting) -> Tensor:
        return meeting.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
