"""Models whose weights are used outside the modules that own them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Around(nn.Module):
    """The root uses its own weight, and the weight of a layer that has already run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x)) * self.scale
        h = F.linear(self.second(h), self.first.weight)
        return self.head(h)


class Block(nn.Module):
    """Uses the weight of an inner layer without calling that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x @ self.inner.weight)


class Inside(nn.Module):
    """torch's attention, whose output projection is never called, and a block of the same kind."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.block, self.head = nn.MultiheadAttention(6, 2, batch_first=True), Block(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.attn(x, x, x, need_weights=False)[0]))


class Method(nn.Module):
    """A layer that is entered by another way than its ``__call__``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), Block()

    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self.head, self.embed(x))


class Branches(nn.Module):
    """Two parallel branches: the backward of one does not need the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(F.gelu(self.left(h)) + torch.tanh(self.right(h)))


class Uneven(nn.Module):
    """The output sizes of its layers are not divisible by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.second(F.gelu(self.first(x)))))
