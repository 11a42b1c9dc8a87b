"""Models whose output for a sample depends, or does not, on the other samples of its batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """``kind`` of what is between two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(6) if kind == "batch norm" else nn.LayerNorm(6)
        self.drop = nn.Dropout(0.5)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.gate = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.between(torch.tanh(self.a(x)))))

    def between(self, x: Tensor) -> Tensor:
        if self.kind == "negatives":
            likeness = F.normalize(x, dim=-1) @ F.normalize(self.b(x), dim=-1).T
            return x * likeness.log_softmax(-1).diagonal()[:, None]
        if self.kind == "mean":
            return x - x.mean(0)
        if self.kind == "mean and dropout":
            return self.drop(x - x.mean(0))
        if self.kind in ("capacity", "experts"):
            return self.routed(x, len(x) if self.kind == "experts" else (len(x) + 1) // 2)
        if self.kind == "functional norm":
            return F.batch_norm(x, None, None, training=True)
        return self.drop(x) if self.kind == "dropout" else self.norm(self.b(x))

    def routed(self, x: Tensor, capacity: int) -> Tensor:
        """Each expert takes the first ``capacity`` samples that want it."""
        first, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            places = (first == n).nonzero()[:, 0][:capacity]
            out = out.index_add(0, places, expert(x[places]))
        return x + out


class OnlyTrained(Net):
    """As a model that works out its loss itself: in training alone."""

    def between(self, x: Tensor) -> Tensor:
        return super().between(x) if self.training else x
