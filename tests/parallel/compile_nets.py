"""Models for ``torch.compile``: with dropout, with another graph in each call, or with no single graph."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Dropped(nn.Module):
    """A block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(8, 8), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.a(x)).tanh()
        return out


class Dropping(nn.Module):
    """A model of three blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropped() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Counting(Dropped):
    """A block that needs another graph in each call: it scales its output by the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + self.calls % 50)


class Counted(nn.Module):
    """A model of one such counting block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counting()])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[0](x)
        return out


class Untraceable(Dropped):
    """A block that cannot be one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Broken(Counted):
    """A model whose block cannot be one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Untraceable()])


class _Saving(Dropped):
    """A block with hooks on what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.double(), lambda t: t):
            return super().forward(x)


class Hooked(Counted):
    """A model of one block with hooks on what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Saving()])


class _LateUntraceable(Untraceable):
    """A block that is one graph on meta tensors only."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return Dropped.forward(self, x)
        return super().forward(x)


class LateBroken(Counted):
    """A model of one block that is one graph on meta tensors only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_LateUntraceable()])


class Copied(nn.Module):
    """A model that runs a modified copy of a block in place of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Dropping().layers[0], nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        copy = deepcopy(self.layers[0]).requires_grad_(False).eval()
        with torch.no_grad():
            for p in copy.parameters():
                p.mul_(0.5)
        out: Tensor = self.layers[1](copy(x)) + self.layers[0].a(x)
        return out


class Sloped(nn.Module):
    """A model whose forward takes a gradient through its block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = self.layers[0](x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope
