"""Models that carry state past the arguments of their modules: streams, iterators, objects, hooks, files."""

from __future__ import annotations

import functools
import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks as saved
from torch.utils.checkpoint import checkpoint as again

from tests.parallel import carried_elsewhere
from tests.parallel.carried_elsewhere import Scaling, Watcher

STREAM = torch.Generator().manual_seed(3)
ENTROPY = random.SystemRandom()
__calls__ = {"n": 0}

SEED: dict[str, Callable[[int], object]] = {
    "torch": torch.manual_seed, "numpy": np.random.seed, "python": random.seed
}  # fmt: skip
DRAW: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand((), dtype=torch.float64),
    "numpy": np.random.rand,
    "python": random.random,
    "generator": lambda: torch.rand((), dtype=torch.float64, generator=STREAM),
}


class Layer(nn.Module):
    """A layer that scales its output by ``factor``; the base class of those that carry something."""

    number = 0.0

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.kind = kind

    def factor(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x)) * self.factor()
        return y


class Draws(Layer):
    """Seeds a random stream, draws from it, or both: ``seed torch``, ``draw torch``, ``seed draw torch``."""

    def factor(self) -> Any:
        *does, stream = self.kind.split()
        if "seed" in does:
            SEED[stream](5)
        return 1 + DRAW[stream]() if "draw" in does else 1.0


def factors() -> Iterator[float]:
    for n in itertools.count():
        yield 1 + n % 5 / 5


class Iterates(Layer):
    """Takes each factor from a generator that another object holds."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__(kind, dim)
        made = factors()
        self.box: Any = {
            "dict": {"next": made},
            "object": SimpleNamespace(next=made),
            "closure": lambda: next(made),
            "partial": functools.partial(next, made),
            "bound": made.__next__,
            "zip": zip(itertools.count(), made, strict=False),
        }[kind]

    def factor(self) -> Any:
        if self.kind == "zip":
            return next(self.box)[1]
        if self.kind in ("dict", "object"):
            return next(self.box["next"] if self.kind == "dict" else self.box.next)
        return self.box()


class Counter:
    """Counts calls; it cannot be copied, because it has a lock."""

    def __init__(self) -> None:
        self.lock, self.n = threading.Lock(), 0

    def __call__(self) -> int:
        with self.lock:
            self.n += 1
            return self.n


class Counts(Layer):
    """Scales by the number of its calls, which an object has that is not copied, or not taken apart."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__(kind, dim)
        queues = {"queue": queue.Queue(), "simple queue": queue.SimpleQueue()}
        self.counter: Any = {"lock": Counter(), "random": random.Random(3).random, **queues}.get(kind)

    def factor(self) -> Any:
        return 1 + self.calls() % 5 / 5

    def calls(self) -> Any:
        if self.kind in ("lock", "random"):
            return self.counter()
        if self.kind.endswith("queue"):
            self.counter.put(None)
            return self.counter.qsize()
        from tests.parallel.carried_elsewhere import CALLS

        calls = __calls__ if self.kind == "dunder" else CALLS
        calls["n"] += 1
        return calls["n"]


class CountsBackwards(Function):
    """Counts its backwards in an attribute of a module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.number += 0.1
        return gradient, None


class ReadsCalls(Function):
    """Scales gradients by a number of a module, which its forwards change."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (1 + ctx.module.number), None


count_backwards, read_calls = CountsBackwards.apply, ReadsCalls.apply


class Backwards(Layer):
    """Has a backward that changes or reads state; the module's own code does not name it."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__(kind, dim)
        self.watcher = Watcher()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        if self.kind == "reads":
            self.number += 0.1
            return read_calls(y, self)  # type: ignore[no-any-return, no-untyped-call]
        y = y * (1 + (self.watcher.number if self.kind == "object" else self.number))
        if self.kind == "alias":
            return count_backwards(y, self)  # type: ignore[no-any-return, no-untyped-call]
        return self.watcher.watch(y) if self.kind == "object" else carried_elsewhere.keep_gradient_norm(y, self)


def scaled(layer: nn.Linear, gradient: Tensor) -> Tensor:
    return gradient * float(layer.weight.detach().norm())


class Hooked(Layer):
    """Has a hook that scales gradients by the norm of its weight."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__(kind, dim)
        if kind == "pre-hook":
            norm = lambda module, grads: tuple(g * float(module.linear.weight.detach().norm()) for g in grads)  # noqa: E731
            self.register_full_backward_pre_hook(norm)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        box = {"layer": self.linear}
        hooks: dict[str, Callable[[Tensor], Tensor]] = {
            "object": Scaling(self.linear),
            "method": Scaling(self.linear).scaled,
            "partial": functools.partial(scaled, self.linear),
            "defaults": lambda g, layer=self.linear: scaled(layer, g),
            "dict": lambda g: scaled(box["layer"], g),
        }
        if self.kind in hooks and y.requires_grad:
            y.register_hook(hooks[self.kind])
        return y


class Decays(Layer):
    """Divides the gradient of its bias by the number of such gradients, in a hook of the parameter."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__(kind, dim)
        self.gradients = 0
        self.linear.bias.register_hook(self.decayed)

    def decayed(self, gradient: Tensor) -> Tensor:
        self.gradients += 1
        return gradient / self.gradients


@torch.library.custom_op("carried::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


BACKWARDS_OF_DOUBLED = {"n": 0}


def backward_of_doubled(ctx: Any, gradient: Tensor) -> Tensor:
    BACKWARDS_OF_DOUBLED["n"] += 1
    return 2 * gradient


doubled.register_autograd(backward_of_doubled)


class Unpacking(saved):
    """Counts the saved tensors that the backward takes."""

    def __init__(self, owner: Layer) -> None:
        super().__init__(lambda t: t, self.unpacked)
        self.owner = owner

    def unpacked(self, t: Tensor) -> Tensor:
        self.owner.number += 1
        return t


class RunsLater(Layer):
    """Scales by a number that code of its own changes in the backward, which torch calls without a hook."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__(kind, dim)
        self.norm = nn.BatchNorm1d(dim)

    def inner(self, x: Tensor) -> Tensor:
        if self.kind == "checkpoint":
            self.number += 1
        return self.norm(self.linear(x)) if self.kind == "checkpointed norm" else self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "unpack":
            with Unpacking(self):
                return torch.tanh(self.linear(x)) / (1 + self.number)
        if self.kind == "custom op":
            return doubled(torch.tanh(self.linear(x))) / (1 + BACKWARDS_OF_DOUBLED["n"])
        return torch.tanh(again(self.inner, x, use_reentrant=False)) / (1 + self.number)


class RawWeight(Layer):
    """Sets a weight of its LSTM at each call, as weight dropout does; the LSTM has a list of its weights."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__(kind, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        weight = self.rnn.weight_hh_l0
        del self.rnn.weight_hh_l0
        self.rnn.register_parameter("raw", nn.Parameter(weight.data))

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.weight_hh_l0 = self.rnn.raw * 0.9
        y: Tensor = torch.tanh(self.linear(x)) + self.rnn(x[:, None])[0][:, 0]
        return y


class Late(Layer):
    """From its seventh call on it sets a number of the next module."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__(kind, dim)
        self.calls, self.next = 0, [self]

    def factor(self) -> Any:
        self.calls += 1
        if self.calls > 6:
            self.next[0].number = 1.0
        return 1 + self.number


KINDS: dict[str, type[Layer]] = {
    k.__name__: k for k in (Layer, Draws, Iterates, Counts, Backwards, Hooked, Decays, RunsLater, RawWeight, Late)
}


class RootCounts(nn.Module):
    """The root counts the gradients of a bias, which it divides by that number, in a hook of the parameter."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(dim, dim) for _ in range(4))
        self.gradients = 0
        self.b.bias.register_hook(self.decayed)

    def decayed(self, gradient: Tensor) -> Tensor:
        self.gradients += 1
        return gradient / self.gradients

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))
        return out


class Carries(nn.Module):
    """Four layers, of which ``b`` and ``c`` carry something: a class of ``KINDS`` and its kind."""

    def __init__(self, b: str = "Layer plain", c: str = "Layer plain", dim: int = 6) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(dim, dim), nn.Linear(dim, dim)
        (first, _, kind), (second, _, other) = b.partition(" "), c.partition(" ")
        self.b, self.c = KINDS[first](kind, dim), KINDS[second](other, dim)
        if isinstance(self.b, Late):
            self.b.next = [self.c]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.c(self.b(self.a(x))))
        return out
