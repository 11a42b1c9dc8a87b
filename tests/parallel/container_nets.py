"""A layer returns two tensors in a container of a user's class; the next layer calls its method."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Pair(NamedTuple):
    x: Tensor
    y: Tensor

    def total(self) -> Tensor:
        return self.x + self.y


class Several(list[Tensor]):
    def total(self) -> Tensor:
        return self[0] + self[1]


class Named(dict[str, Tensor]):
    def total(self) -> Tensor:
        return self["x"] + self["y"]


class Gives(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.lin(x))
        return {"Pair": Pair(x, y), "Several": Several([x, y]), "Named": Named(x=x, y=y)}[self.kind]


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 5)

    def forward(self, given: Any) -> Tensor:
        out: Tensor = self.lin(given.total())
        return out


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), Gives(kind), Takes()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x)))
        return out


@torch.library.custom_op("tests::without_a_fake", mutates_args=())
def without_a_fake(x: Tensor) -> Tensor:
    return x * 2.0


without_a_fake.register_autograd(lambda ctx, grad: grad * 2.0)


class Fakeless(nn.Module):
    """A layer uses an operator that torch can run on real values only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), _Fakeless(), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x)))
        return out


class _Fakeless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = without_a_fake(torch.tanh(self.lin(x)))
        return out
