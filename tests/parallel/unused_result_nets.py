"""Nets in which nothing trains a result of a module: the weight that made it has no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Sides(nn.Module):
    """A result, and those of the modules before it with one more."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, sides: tuple[Tensor, ...] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        return torch.tanh(self.net(x)), (*sides, self.side(x))


class Pair(Sides):
    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.net(x)), self.side(x)


class OwnBackward(torch.autograd.Function):
    """Two results; the backward does something else if the second one is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1.0, x * 2.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        one, two = grads
        assert one is not None
        return one * 1.5 if two is None else one + 2 * two


class Doubled(Sides):
    def forward(self, x: Tensor) -> Any:
        return OwnBackward.apply(torch.tanh(self.net(x)))


class Watched(Sides):
    """A gradient hook of the second result changes the state that the first one has."""

    def forward(self, x: Tensor) -> Any:
        side = self.side(x)
        if side.requires_grad:
            side.register_hook(lambda g: g + 1)
        return torch.tanh(self.net(x)), side


class TakesFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, x: Tensor, side: Any) -> Tensor:
        return torch.tanh(self.net(x))


class TakesMask(TakesFirst):
    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return torch.tanh(self.net(x)) * (side > 0).to(x.dtype)


class TakesDetached(TakesFirst):
    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return torch.tanh(self.net(x)) * side.detach()


class Hidden(nn.Module):
    """Hidden values are collected, and not used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(6, 6), Sides(), Sides(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(*self.b(self.a(x)))[0])


class Two(nn.Module):
    """``makes`` gives two results to ``takes``."""

    def __init__(self, makes: str, takes: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), globals()[makes](), globals()[takes]()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(*self.b(self.a(x))))
