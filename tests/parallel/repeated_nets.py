"""Nets whose modules may compute something else when the backward runs them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Part(nn.Module):
    def __init__(self, way: str, bag: list[Any]) -> None:
        super().__init__()
        self.linear, self.way, self.bag = nn.Linear(6, 6), way, bag
        self.warm, self.calls, self.table = False, 0, dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x * WAYS[self.way](self, x)))


def warms_up(part: Part, x: Tensor) -> float:
    """The factor is half in the first forward."""
    first, part.warm = not part.warm, True
    return 0.5 if first else 1.0


def counts(part: Part, x: Tensor) -> float:
    part.calls += 1
    return part.calls / 2


def fills_a_table(part: Part, x: Tensor) -> Tensor:
    """A table that is made once; a new one would have the same values."""
    if x.shape[-1] not in part.table:
        part.table[x.shape[-1]] = torch.linspace(1, 2, x.shape[-1], dtype=x.dtype, device=x.device)
    return part.table[x.shape[-1]]


def leaves(part: Part, x: Tensor) -> float:
    part.bag.append(0.5)
    return 1.0


def takes(part: Part, x: Tensor) -> float:
    """A value that another part has left, or 1 if none is left, as in a second forward."""
    return float(part.bag.pop()) if part.bag else 1.0


WAYS: dict[str, Any] = {f.__name__: f for f in (warms_up, counts, fills_a_table, leaves, takes)}


class Repeated(nn.Module):
    """A sequence of parts, one for each of ``ways``."""

    def __init__(self, ways: list[str]) -> None:
        super().__init__()
        bag: list[Any] = []
        self.parts = nn.ModuleList(Part(way, bag) for way in ways)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)
