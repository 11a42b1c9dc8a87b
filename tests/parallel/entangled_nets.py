"""Modules whose backward reads or writes state that another forward uses, so the order of calls matters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Reversal(torch.autograd.Function):
    """Reads its factor from ``box`` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: dict[str, float]) -> Tensor:
        ctx.box = box
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.box["factor"] * g, None


class Kept(torch.autograd.Function):
    """Saves its factor in the context of the call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * g, None


class ByClass(torch.autograd.Function):
    """Its factor is an attribute of the class, shared by all calls."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -ByClass.factor * g


class Leaves(torch.autograd.Function):
    """Its backward writes the same number each time, which the next forward reads."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Leaves.factor

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Leaves.factor = 0.5
        return g


class Middle(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.factor = how, 1.0
        self.box, self.grown, self.scale = {"factor": 1.0}, [0.0], self.shut()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("norm", torch.ones(()))
        if how == "parameter":
            self.lin.weight.register_hook(lambda g: self.box.update(factor=self.box["factor"] + 1))

    def shut(self) -> Any:
        state = [1.0]

        def scale(g: Tensor) -> Tensor:
            return g * state[0]

        def moved() -> None:
            state[0] *= 0.5

        return scale, moved

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x))
        if self.how == "function":
            self.box["factor"] *= 0.5
            return Reversal.apply(y, self.box)
        if self.how == "hook":
            self.factor *= 0.5
            y.register_hook(lambda g: g * self.factor)
        elif self.how == "buffer":
            self.norm = self.norm * 2
            y.register_hook(lambda g: g / self.norm)
        elif self.how == "closure":
            self.scale[1]()
            y.register_hook(self.scale[0])
        elif self.how == "class":
            ByClass.factor *= 0.5
            y = ByClass.apply(y)
        elif self.how == "leaves in a class":
            return Leaves.apply(y)
        elif self.how == "leaves":
            y.register_hook(lambda g: self.grown.__setitem__(0, float(g.norm())))
            return y + self.grown[0]
        elif self.how == "parameter":
            return y * self.box["factor"]
        elif self.how == "kept":
            self.factor *= 0.5
            return Kept.apply(y, self.factor)
        elif self.how == "argument":
            self.factor *= 0.5
            y.register_hook(lambda g, factor=self.factor: g * factor)
        elif self.how == "counts":
            y.register_hook(lambda g: self.grown.__setitem__(0, self.grown[0] + 1))
        return y


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 6), Middle(how), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.a(x))))
