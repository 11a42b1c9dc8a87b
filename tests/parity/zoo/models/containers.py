"""How modules are stored, named and called."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.zoo.case import ABCD, D, Net, block, odd


@odd("blocks.in", "blocks.class", "blocks.lambda", "blocks.out")
class KeywordNames(nn.Module):
    """A ModuleDict whose keys are Python keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"in": block(), "class": block(), "lambda": block(), "out": nn.Linear(D, D)})

    def forward(self, x: Tensor) -> Tensor:
        for b in self.blocks.values():
            x = b(x)
        return x


@odd("net.0", "net.1", "net.2")
class NestedSequential(nn.Module):
    """Sequentials in Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Sequential(block(), nn.Sequential(block())), nn.Sequential(block()), nn.Linear(D, D)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


@odd("0", "1", "2", "3")
class IsSequential(nn.Sequential):
    """The root itself is a Sequential."""

    def __init__(self) -> None:
        super().__init__(block(), block(), block(), nn.Linear(D, D))


@odd(*ABCD)
class PlainList(Net):
    """The modules are also in a plain list, through which they are called."""

    def extra(self) -> None:
        self.order = [self.a, self.b, self.c, self.d]

    def forward(self, x: Tensor) -> Tensor:
        for m in self.order:
            x = m(x)
        return x


@odd(*ABCD)
class DeepCopied(Net):
    """Blocks are deep copies of one."""

    def extra(self) -> None:
        self.b, self.c = copy.deepcopy(self.a), copy.deepcopy(self.a)


@odd(*ABCD)
class WrappedForward(Net):
    """``forward`` is replaced on an instance, as accelerate and PEFT do."""

    def extra(self) -> None:
        inner = self.b.forward
        self.b.forward = lambda x: inner(x) * 2  # type: ignore[method-assign]


@odd(*ABCD)
class WrappedInside(Net):
    """``forward`` is replaced on a layer within a block."""

    def extra(self) -> None:
        layer = self.c[0]
        layer.forward = partial(_scaled, layer.forward, 1.5)


def _scaled(inner: Any, by: float, x: Tensor) -> Tensor:
    return inner(x) * by


@odd(*ABCD)
class WrappedRoot(Net):
    """The root's own ``forward`` is replaced on the instance."""

    def extra(self) -> None:
        inner = self.forward
        self.forward = lambda x: inner(x) * 2  # type: ignore[method-assign]


class _Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def __call__(self, x: Tensor, *args: Any) -> Tensor:  # type: ignore[override]
        return super().__call__(x * 1.5) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@odd("a", "called", "c", "d")
class OwnCall(Net):
    """A module that overrides ``__call__``."""

    def extra(self) -> None:
        self.called = _Called()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.called(self.a(x))))


@odd(*ABCD)
class Properties(Net):
    """A module and a weight are reached through properties."""

    @property
    def first(self) -> nn.Module:
        return self.a

    @property
    def gain(self) -> Tensor:
        return self.b[0].weight[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.first(x)))) * self.gain


class _Passes(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@odd(*ABCD)
class PassesAttributes(Net):
    """A wrapper that passes unknown attributes to the module inside."""

    def extra(self) -> None:
        self.b = _Passes(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) + self.b.bias * 0.5
        return self.d(self.c(h))


@odd(*ABCD)
class Methods(Net):
    """Blocks are called by other methods than ``__call__``."""

    def features(self, x: Tensor) -> Tensor:
        return self.b.forward(self.a.forward(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.features(x)))


@odd("inner.a", "inner.b", "inner.c", "inner.d")
class Wrapped(nn.Module):
    """The full model is one module of the root, which calls a method of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner.forward(x)
        return out


@odd(*ABCD)
class Closures(Net):
    """Blocks are called from a list of closures."""

    def extra(self) -> None:
        self.steps = [lambda x: self.a(x), lambda x: self.b(x) + x, partial(self.call, "c")]

    def call(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = getattr(self, name)(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return self.d(x)


@odd(*ABCD)
class AddedLate(Net):
    """A module is registered again and one is added, so their order differs from that of the calls."""

    def extra(self) -> None:
        a = self.a
        del self.a
        self.a = a
        self.add_module("z", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.z(self.c(self.b(self.a(x)))))


class _Holder:
    def __init__(self, net: nn.Module) -> None:
        self.net = net


@odd(*ABCD)
class HeldElsewhere(Net):
    """A block is called through an object that is not a module."""

    def extra(self) -> None:
        self.holder = _Holder(self.b)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.holder.net(self.a(x))))


@odd("a", "parts.0", "parts.1", "parts.2", "d")
class Iterated(nn.Module):
    """A ModuleList run by index, each block scaled by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = block(), nn.Linear(D, D)
        self.parts = nn.ModuleList([block(), block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for n, part in enumerate(self.parts):
            h = h + part(h) * (n + 1) / 3
        return self.d(h)


@odd(*ABCD)
class ApplyInit(Net):
    """Initialized by ``apply`` and by a copy under no_grad."""

    def extra(self) -> None:
        self.apply(self._start)
        with torch.no_grad():
            self.d.weight.copy_(torch.eye(D) * 0.5)

    @staticmethod
    def _start(m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.orthogonal_(m.weight, 0.9)
            nn.init.constant_(m.bias, 0.1)
