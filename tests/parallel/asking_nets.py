"""Models that use more of a tensor than its numbers, and models that hide parts of their state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Marked(Tensor):
    """A subclass of ``Tensor``."""


class Gives(nn.Module):
    """Returns a tensor that is special as ``how`` says: returned twice, a view, of a subclass, or marked."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Any:
        y: Any = torch.tanh(self.lin(x))
        if self.how == "same":
            return y, y
        if self.how == "class":
            return y.as_subclass(Marked)
        if self.how == "view":
            return y.view(-1, 6)
        if self.how == "attribute":
            y.marked = True
        return y


class Takes(nn.Module):
    """Computes something else when its input is special as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(6, 6), how

    def forward(self, given: Any) -> Tensor:
        x, other = given if isinstance(given, tuple) else (given, None)
        special = {
            "same": x is other,
            "class": isinstance(x, Marked),
            "view": x._is_view(),
            "attribute": hasattr(x, "marked"),
            "leaf": not x.is_leaf,
            "node": x.grad_fn is not None,
            "changed in place": False,
        }[self.how]
        x = x.as_subclass(Tensor)
        if self.how == "changed in place":
            x = x.mul_(1.0)
        out: Tensor = self.lin(x) * (3.0 if special else 1.0)
        return out


class Asks(nn.Module):
    """A layer passes more than numbers to the next one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 6), Gives(how), Takes(how), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.c(self.b(self.a(x))))
        return out


class Hides(nn.Module):
    """The method ``how`` of the model omits what belongs to ``a``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.b.parameters() if self.how == "parameters" else super().parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        every = super().named_parameters(*args, **kwargs)
        return ((n, p) for n, p in every if self.how != "named_parameters" or not n.startswith("a."))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        every = super().named_buffers(*args, **kwargs)
        return ((n, b) for n, b in every if self.how != "named_buffers" or not n.startswith("a."))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        every = super().named_modules(*args, **kwargs)
        return ((n, m) for n, m in every if self.how != "named_modules" or not n.startswith("a."))


class _Fuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(6, 5)
        self.both: Tensor | None = None

    def train(self, mode: bool = True) -> _Fuses:
        super().train(mode)
        self.both = None if mode else (self.one.weight + self.two.weight).detach()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.both is not None:
            return nn.functional.linear(x, self.both, self.one.bias + self.two.bias)
        out: Tensor = self.one(x) + self.two(x)
        return out


class Fuses(nn.Module):
    """In evaluation mode a layer uses the sum of two weights, as RepVGG does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), _Fuses()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out
