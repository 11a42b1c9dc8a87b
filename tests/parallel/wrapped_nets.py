"""Models around models, as libraries ship them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask * self.down(F.gelu(self.up(self.norm(x))))


class Body(nn.Module):
    """Layers with a boolean mask, made by the code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 6), nn.LayerNorm(6)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        x, mask = self.embed(tokens), (tokens > 0).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, mask)
        return (self.norm(x),)


class Looking(Body):
    """The code between the layers looks at the data, so the model cannot be split."""

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        if bool((tokens == -1).any()):
            tokens = tokens.clamp(min=0)
        return super().forward(tokens)


class Counting(Body):
    """The code between the layers reads numbers that are always the same."""

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return super().forward(tokens if bool((place[1:] > place[:-1]).all()) else tokens.flip(1))


class Lm(nn.Module):
    """A model around another one that contains the layers; the head is tied to the table."""

    kind: type[Body] = Body

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = self.kind(), nn.Linear(6, 8, bias=False)
        self.head.weight = self.body.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens)[0])


class Wrapped(nn.Module):
    """A root whose only child is the full model."""

    kind: type[Lm] = Lm

    def __init__(self) -> None:
        super().__init__()
        self.m = self.kind()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.m(tokens)


class LookingLm(Lm):
    kind = Looking


class CountingLm(Lm):
    kind = Counting


class WrappedLooking(Wrapped):
    kind = LookingLm


class WrappedCounting(Wrapped):
    kind = CountingLm


class Weighed(nn.Module):
    """Computes the same numbers with or without ``look``: Python that reads values between the layers."""

    def __init__(self, look: bool) -> None:
        super().__init__()
        self.a, self.b, self.look = nn.Linear(6, 6), nn.Linear(6, 3), look

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.look and float(h.detach().sum()) > 1e9:
            h = h * 2
        return self.b(h)
