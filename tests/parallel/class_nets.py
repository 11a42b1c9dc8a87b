"""Models whose forward looks at the classes of modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SCALES = {"Named": 0.5}


class Named(nn.Module):
    """A layer that scales by the number that ``SCALES`` has for the name of its class."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        scale = SCALES.get(type(self).__name__, 2.0)
        return torch.tanh(self.inner(x)) * scale


class Exact(nn.Module):
    """A layer that handles a plain Linear in another way than its subclasses."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return torch.tanh(out) if type(self.inner) is nn.Linear else out * 0.1


class Ancestors(nn.Module):
    """A layer that looks at the classes that its Linear inherits from."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        inherits = type(self.inner).__mro__[:2]
        return torch.tanh(self.inner(x)) + float(inherits == (nn.Linear, nn.Module))


LAYERS: dict[str, Any] = {"named": Named, "exact": Exact, "ancestors": Ancestors}


class Classes(nn.Module):
    """Two layers and a head; the model itself branches on the classes of all three, and its own."""

    def __init__(self, layer: str, dim: int = 6) -> None:
        super().__init__()
        self.kind = LAYERS[layer]
        self.a = self.kind(dim)
        self.b = self.kind(dim)
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = layer(x) + (0.25 if type(layer) is self.kind else -0.25)
        x = self.head(x)
        return x * 2 if type(self) is Classes else x


class Containers(nn.Module):
    """Layers in a sequence, and a model that scales by a number for exactly this container."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))
        self.b = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x)
        return self.head(x) * (1 if type(self.a) is nn.Sequential else 3)
