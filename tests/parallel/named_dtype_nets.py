"""Models whose constructors name the dtype of their tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Graph(nn.Module):
    """Multiplies by a ``FloatTensor``, as pygcn does."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.FloatTensor(dim, dim))
        nn.init.normal_(self.weight, std=0.3)
        self.register_buffer("low", torch.linspace(0.1, 1, dim, dtype=torch.bfloat16))
        self.register_buffer("counts", torch.arange(dim, dtype=torch.int8))
        self.register_buffer("on", torch.arange(dim) > 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.on, torch.mm(x, self.weight) * self.low + self.counts, x)


class Named(nn.Module):
    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.first = Graph(dim)
        self.tied = nn.Linear(dim, dim, dtype=torch.float32)
        self.last = nn.Linear(dim, dim, dtype=torch.float32)
        self.last.weight = self.tied.weight
        self.scale = nn.Parameter(torch.tensor([1.1], dtype=torch.float))
        self.norm = nn.LayerNorm(dim, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.tied(self.first(x))) * self.scale))


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.first(x), self.weight)
