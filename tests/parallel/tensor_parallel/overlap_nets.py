"""Models whose matmuls are called in ways that do not occur in a language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Branches(nn.Module):
    """Layers with bias that are used three times, once on a transposed tensor, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.down = nn.Linear(4, 4), nn.Linear(6, 8), nn.Linear(8, 6)
        self.still, self.part, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 10)
        self.still.requires_grad_(False)
        self.wide.weight.data = self.wide.weight.data.t().contiguous().t()

    def forward(self, x: Tensor) -> Tensor:
        across = self.first(x).transpose(1, 2)
        a = self.down(torch.tanh(self.wide(across)))
        b = self.down(torch.relu_(self.wide(a))) + self.down(self.wide(across))
        return self.head(self.part(self.still(a) + b))
