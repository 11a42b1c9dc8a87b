"""Nets whose layers share one module that changes its own state in a forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Shared(nn.Module):
    """A module without trained weights; ``kind`` is what it keeps.

    A cache is filled at the first call: in an attribute, a dictionary, a buffer, or from a frozen weight.
    """

    scale: Tensor

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.calls, self.filled = kind, 0, 0
        self.kept: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.frequencies = nn.Parameter(torch.linspace(0.5, 1, width), requires_grad=False)
        self.register_buffer("scale", torch.zeros(2 * width), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        if self.kind == "attribute":
            if self.kept is None:
                self.kept = self.frequencies.cos()
            return x * self.kept
        if self.kind == "dictionary":
            if n not in self.tables:
                self.tables[n] = torch.linspace(0.5, 1, n, dtype=x.dtype, device=x.device)
            return x * self.tables[n]
        if self.kind == "buffer":
            if self.filled < n:
                self.scale[:n] = self.frequencies.cos()
                self.filled = n
            return x * self.scale[:n]
        if self.kind == "data":
            kept, self.kept = self.kept, x.detach().mean(-1, keepdim=True)
            return x if kept is None else x * kept
        if self.kind == "first data":
            self.kept = x.detach().std() if self.kept is None else self.kept
            return x / self.kept
        if self.kind == "calls":
            self.calls += 1
            return x * (1 + 0.01 * self.calls)
        if self.kind == "layer":
            self.calls = (self.calls + 1) % 2
            return x * (1 + 0.1 * self.calls)
        if self.kind == "first call":
            self.calls, calls = 1, self.calls
            return x if calls else x + 0.1
        assert self.kind == "first buffer"
        if not self.filled:
            self.filled = 1
            self.scale.fill_(0.5)
            return x
        return x * self.scale[:n]


class Layer(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.linear = shared, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.shared.turned(x)))


class Caches(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        shared = Shared(kind, 6)
        self.a, self.b, self.head = Layer(shared), Layer(shared), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))
