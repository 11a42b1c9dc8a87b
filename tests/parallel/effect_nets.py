"""Modules whose forward does more than compute, or whose tensors are more than weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """Three layers around a ``middle`` of one's own."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.middle, self.b, self.head = (
            nn.Linear(6, 6), middle or self.made(), nn.Linear(6, 6), nn.Linear(6, 5),
        )  # fmt: skip

    def made(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(self.middle(torch.tanh(self.a(x))))))


class Complex(Net):
    """A parameter of complex numbers."""

    class made(nn.Module):
        def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(6, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.turn).real
