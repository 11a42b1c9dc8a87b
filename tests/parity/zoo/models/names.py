"""Modules, parameters and arguments with names that mean something else in Python code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parity.zoo.case import Net, block, odd


@odd("a", "self", "c", "d")
class CalledSelf(Net):
    """A module is named ``self``."""

    def extra(self) -> None:
        self.add_module("self", self.b)
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.self(self.a(x))))


@odd("torch", "getattr", "given_0", "None_")
class CalledAsTorch(nn.Module):
    """Modules and buffers are named like functions and keywords of the code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.getattr, self.given_0, self.None_ = block(), block(), block(), nn.Linear(8, 8)
        for n, name in enumerate(("add", "mul", "clone", "input", "x")):
            self.register_buffer(name, torch.linspace(n, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.torch(x) + self.add + self.x * self.input
        h = self.getattr(h.clone() * self.mul) + h
        h += self.given_0((h * 2).clone() * self.clone)
        return self.None_(h.to(torch.float64)) * self.add.add(1)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, **by: Tensor) -> Tensor:
        return self.inner(x) + by["in"] * 0.5 + by["not a name"]


@odd("a", "b", "scaled", "d")
class KeywordsAsArguments(Net):
    """A module is called with ``**{"in": x}``."""

    def extra(self) -> None:
        self.scaled = _Scaled()
        del self.c

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.d(self.scaled(self.b(h), **{"in": h, "not a name": h.sin()}))


@odd("by.fi", "by.\ufb01", "by.x+y", "d")
class OneLetterTwice(Net):
    """Two keys that Python reads as one name, and one that is not a name."""

    def extra(self) -> None:
        self.by = nn.ModuleDict({"fi": self.a, "\ufb01": self.b, "x+y": self.c})
        del self.a, self.b, self.c

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for key in self.by:
            h = self.by[key](h)
        return self.d(h)


@odd("by.it's", 'by."', "by.\\", "d")
class Quoted(Net):
    """Keys with quotes and a backslash."""

    def extra(self) -> None:
        self.by = nn.ModuleDict({"it's": self.a, '"': self.b, "\\": self.c})
        del self.a, self.b, self.c

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for module in self.by.values():
            h = module(h)
        return self.d(h)
