"""Modules that append to a list that is passed as an argument."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Leaves(nn.Linear):
    """Appends a value to a list that it gets as an argument."""

    def forward(self, x: Tensor, values: list[Tensor]) -> Tensor:  # type: ignore[override]
        h = super().forward(x)
        values.append(h.square().mean(-1, keepdim=True))
        return h


class Collects(nn.Module):
    """Calls a layer that appends a value to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.inner = nn.Linear(6, 6), Leaves(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        values: list[Tensor] = []
        h = self.inner(self.lin(x), values)
        return h * (1 + sum(values))


class Listing(nn.Module):
    """The model itself passes a list to its layers, which append values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Leaves(6, 6), Leaves(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        values: list[Tensor] = []
        h = self.b(torch.tanh(self.a(x, values)), values)
        return self.head(h) * (1 + sum(values))
