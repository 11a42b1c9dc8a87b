"""Tensors with other references than as parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.parity.zoo.case import ABCD, D, Net, block, odd


@odd(*ABCD)
class WeightsInList(Net):
    """A plain list of weights; the glue scales the logits by the mean squares of two of them."""

    def extra(self) -> None:
        self.weights = [p for p in self.parameters() if p.ndim == 2]

    def forward(self, x: Tensor) -> Tensor:
        size = self.weights[0].square().mean() + self.weights[-1].square().mean()
        return super().forward(x) * (1 + size)


class _ByDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 3)
        self.known = {"w": self.weight}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.known["w"])


@odd("a", "held", "c", "d")
class WeightInDict(Net):
    """A module reaches its own weight through a plain dictionary."""

    def extra(self) -> None:
        self.held = _ByDict()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.held(self.a(x))))


def _times(w: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tanh(x @ w)


class _ByClosure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 3)
        self.function = _times(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@odd("a", "held", "c", "d")
class WeightInClosure(WeightInDict):
    """A module reaches its own weight through a closure."""

    def extra(self) -> None:
        self.held = _ByClosure()
        del self.b


class _ByView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(D * D + D) / 3)
        self.weight, self.bias = self.flat[: D * D].view(D, D), self.flat[D * D :]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias)


@odd("a", "held", "c", "d")
class ViewsOfOne(WeightInDict):
    """One flat parameter, used through views that the constructor made."""

    def extra(self) -> None:
        self.held = _ByView()
        del self.b


class _SameMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        t = torch.randn(D, D) / 3
        self.p, self.q = nn.Parameter(t), nn.Parameter(t)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.p) + x @ self.q


@odd("a", "held", "c", "d")
class SameMemory(WeightInDict):
    """Two parameters share memory: each has a gradient, and the optimizer steps both."""

    def extra(self) -> None:
        self.held = _SameMemory()
        del self.b


class _Follows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 3)
        self.register_buffer("same", self.weight.data)
        self.same: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) + x @ self.same


@odd("a", "held", "c", "d")
class BufferOfWeight(WeightInDict):
    """A buffer that shares a weight's memory and therefore follows it."""

    def extra(self) -> None:
        self.held = _Follows()
        del self.b


class _TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(2, D)
        self.register_buffer("both", both)
        self.register_buffer("first", both[0])
        self.both: Tensor
        self.first: Tensor
        self.net = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.both.add_(0.1)
        return torch.tanh(self.net(x) + self.first)


@odd("a", "held", "c", "d")
class BufferViews(WeightInDict):
    """A buffer that is a view of another, which the forward changes."""

    def extra(self) -> None:
        self.held = _TwoViews()
        del self.b


class _Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 3)
        self.weight.scale = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight * self.weight.scale)  # type: ignore[attr-defined]


@odd("a", "held", "c", "d")
class AttributeOfWeight(WeightInDict):
    """A weight carries an attribute that the forward reads."""

    def extra(self) -> None:
        self.held = _Marked()
        del self.b


class _Kind(nn.Parameter):
    """A subclass of ``nn.Parameter``."""


@odd("a", "held", "c", "d")
class ParameterSubclass(WeightInDict):
    """A weight whose class is a subclass of Parameter."""

    def extra(self) -> None:
        self.held = _ByDict()
        self.held.weight = _Kind(torch.randn(D, D) / 3)
        self.held.known = {"w": self.held.weight}
        del self.b


@odd(*ABCD)
class HiddenInList(Net):
    """A fixed network in a list, which is not in the state dict."""

    def extra(self) -> None:
        hidden = nn.Linear(D, D, bias=False).requires_grad_(False)
        nn.init.eye_(hidden.weight)
        self.hidden = [hidden]

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)) + self.hidden[0](x)))


@odd(*ABCD)
class TensorAttribute(Net):
    """A plain tensor of the root, used at both ends."""

    def extra(self) -> None:
        self.scale = torch.linspace(0.5, 1.5, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x * self.scale))) * self.scale)


@odd(*ABCD)
class TogglesRequiresGrad(Net):
    """The second block is frozen until the seventh call, by requires_grad_ in the forward."""

    def extra(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.b.requires_grad_(self.calls > 6)
        return super().forward(x)


@odd("a", "n", "c", "d")
class EvalInForward(Net):
    """The forward puts a batch norm into evaluation mode."""

    def extra(self) -> None:
        self.n = nn.BatchNorm1d(D)
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        self.n.eval()
        return self.d(self.c(self.n(self.a(x))))


class _Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = block(), 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        out: Tensor = self.net(x)
        return out


@odd("a", "held", "c", "d")
class ExtraState(WeightInDict):
    """A module with extra state in its state dict."""

    def extra(self) -> None:
        self.held = _Extra()
        del self.b
