"""Models that compute with nested tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Jagged(nn.Module):
    """Makes a nested tensor of 2 rows per sample, or of as many as its Python reads from the data."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.net, self.reads = nn.Linear(6, 6), reads

    def forward(self, x: Tensor) -> Tensor:
        rows = 2 + (int(x.sum().item() > 1e6) if self.reads else 0)
        nested = torch.nested.as_nested_tensor([t[:rows] for t in x], layout=torch.jagged)
        return torch.tanh(self.net(nested)).values().reshape(len(x), -1)[:, :6]


class Inside(nn.Module):
    """A module that uses a nested tensor inside; ``reads``: its Python reads values."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), _Jagged(reads), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


class Between(nn.Module):
    """A nested tensor passes from module to module; ``returned``: it is also the result."""

    def __init__(self, returned: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.head, self.returned = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5), returned

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        nested = torch.nested.as_nested_tensor([t[:2] for t in h], layout=torch.jagged)
        nested = self.b(torch.tanh(nested))
        return nested if self.returned else self.head(nested.to_padded_tensor(0.0, output_size=h.shape).sum(1))
