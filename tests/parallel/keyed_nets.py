"""Models that find what belongs to a module or a tensor by its identity, or reach a tensor by an array."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class ByTensor(nn.Module):
    """A layer that finds its scale under the id of its weight."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.scales = {id(self.inner.weight): 0.5}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scales.get(id(self.inner.weight), 2.0)


class ByModule(nn.Module):
    """A layer that finds its scale under the id of its inner layer."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.scales = {id(self.inner): 0.5}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scales.get(id(self.inner), 2.0)


class ByWeakKey(nn.Module):
    """A layer that finds its scale in a weak dictionary, under its inner layer."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.scales: Any = weakref.WeakKeyDictionary({self.inner: 0.5})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scales.get(self.inner, 2.0)


class ByWeakSet(nn.Module):
    """A layer that scales what a weak set contains."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.scaled = weakref.WeakSet([self.inner])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * (0.5 if self.inner in self.scaled else 2.0)


class InAList(nn.Module):
    """A layer that has the id of its weight in a list."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.scaled = [("weight", id(self.inner.weight))]

    def forward(self, x: Tensor) -> Tensor:
        known = any(key == id(self.inner.weight) for _, key in self.scaled)
        return torch.tanh(self.inner(x)) * (0.5 if known else 2.0)


class ByVersion(nn.Module):
    """A layer that computes the square of its weight again when the version of the weight has changed."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.version, self.scale = -1, 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.inner.weight._version != self.version:
            self.version = self.inner.weight._version
            self.scale = float(self.inner.weight.detach().square().mean() * 10)
        return torch.tanh(self.inner(x)) * self.scale


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "by tensor": ByTensor, "by module": ByModule, "weak key": ByWeakKey, "weak set": ByWeakSet,
    "list": InAList, "version": ByVersion,
}  # fmt: skip


class Keyed(nn.Module):
    """Two layers of one kind and a head."""

    def __init__(self, layer: str, dim: int = 6) -> None:
        super().__init__()
        self.a = LAYERS[layer]()
        self.b = LAYERS[layer]()
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x)
        return self.head(x)


class Device(nn.Module):
    """A model whose own code, between its layers, takes another path on a device."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(dim, dim)
        self.b = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if x.is_cpu:
            x = x * 2
        return self.b(x)


TABLE, VALUES, FIRST = np.ones(6), torch.ones(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
"""Memory in which a model makes a tensor, although none of its attributes leads there."""

MEAN, MEANS = torch.zeros(1, dtype=torch.float64), {"h": torch.zeros(6, dtype=torch.float64)}
"""Statistics that a model keeps outside of its modules."""


class InAnArray(nn.Module):
    """A layer whose scale lies in the memory of an array, which ``changes`` with each forward."""

    OF_CLASS = (np.ones(6),)

    def __init__(self, kind: str, changes: bool = True, dim: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.changes, self.kind = changes, kind
        if kind not in ("global", "class"):
            self.table: Any = array("d", [1.0] * dim) if kind == "array" else np.ones(dim)
        made = torch.as_tensor if kind == "as_tensor" else torch.from_numpy
        scale = torch.frombuffer(self.memory(), dtype=torch.float64) if kind == "array" else made(self.memory())
        if kind == "parameter":
            self.scale: Tensor = nn.Parameter(scale)
        elif kind == "attribute":
            self.scale = scale
        else:
            self.register_buffer("scale", scale)

    def memory(self) -> Any:
        return TABLE if self.kind == "global" else self.OF_CLASS[0] if self.kind == "class" else self.table

    def forward(self, x: Tensor) -> Tensor:
        table = self.memory()
        if self.changes:
            for i in range(len(table)):
                table[i] *= 0.5
        seen = 0.0 if self.kind in ("global", "class") else float(table[0])
        return torch.tanh(self.inner(x)) * self.scale + seen


class InATensor(nn.Module):
    """A layer whose scale is, or is a view of, a global tensor, which its forward also uses."""

    def __init__(self, kind: str, dim: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.kind = kind
        if kind == "parameter":
            self.scale: Tensor = nn.Parameter(VALUES)
        elif kind == "first values":
            self.scale = nn.Parameter(FIRST)
        else:
            self.register_buffer("scale", VALUES if kind == "itself" else VALUES[:])

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("itself", "view"):
            with torch.no_grad():
                VALUES.mul_(0.5)
        if self.kind == "changed":
            with torch.no_grad():
                self.scale.mul_(0.5)
        x = torch.tanh(self.inner(x)) * self.scale
        return x + VALUES if self.kind in ("parameter", "read", "changed") else x


class Statistics(nn.Module):
    """A layer that keeps the mean of its outputs in a global tensor."""

    def __init__(self, kind: str, dim: int = 6) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        if self.kind == "number":
            MEAN.mul_(0.9).add_(float(h.mean()))
            return self.last(h * (1 + MEAN))
        if self.kind == "tensor":
            MEANS["h"].mul_(0.9).add_(h.detach().mean(0))
        else:
            MEANS["h"].data.copy_(h.detach().mean(0) * 0.1 + MEANS["h"])
        return self.last(h * (1 + MEANS["h"]))


class Remembers(nn.Module):
    """A layer that compares its weight with that of the last call, which a buffer has."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin = nn.Linear(dim, dim)
        self.register_buffer("before", self.lin.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            change = (self.lin.weight - self.before).square().sum()
            self.before.copy_(self.lin.weight)
        return torch.tanh(self.lin(x)) * (1 + change)


class Remembering(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.a, self.b = Remembers(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Clamps(nn.Module):
    """A layer that changes its input, unseen by autograd."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x.data.clamp_(-0.1, 0.1)
        return self.lin(x)


class Saving(nn.Module):
    """A layer whose result, which it saves for its backward, the next one changes."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.b, self.head = Clamps(dim), nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x)
        return self.head(x)
