"""Nets whose code runs in unexpected places, and nets whose buffers are replaced."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from tests.parallel.python_state_nets import Net


class GradFn(Net):
    """A hook on an inner node of autograd."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda grads: tuple(g / 2 for g in grads))
        return self.head(h)


def _fused(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) * y + 1.0


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit
    fused = torch.jit.script(_fused)


class Scripted(Net):
    """A TorchScript function between modules; from its second call on, its operations bypass autograd."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.head(fused(self.b(h), h))


class Threads(Net):
    """Two modules run in threads."""

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            one, two = pool.map(lambda m: m(x), (self.a, self.b))
        return self.head(one + two)


class _Yields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield self.one(x)
        yield self.two(x)


class Yields(Net):
    """A module whose forward is a generator."""

    def more(self) -> None:
        self.b = _Yields()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(self.b(self.a(x))))


class _Saves(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.state_dict()["weight"].sum()


class SavesInside(Net):
    """A module calls its ``state_dict`` in its forward."""

    def more(self) -> None:
        self.b = _Saves()


class Conditional(Net):
    """torch.cond chooses between two functions of a module."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.cond(h.sum() > 0, lambda t: self.b(t).sin(), lambda t: self.b(t).cos(), (h,))
        return self.head(h)


class _Buffers(nn.Linear):
    def __init__(self, persistent: bool = True, start: Tensor | None = None) -> None:
        super().__init__(6, 6)
        self.register_buffer("seen", start, persistent=persistent)
        self.seen: Any


class _Grows(_Buffers):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen = torch.cat([self.seen, out.detach().mean(0, keepdim=True)])
        return out


class Grows(Net):
    """A persistent buffer grows."""

    def more(self) -> None:
        self.b = _Grows(start=torch.zeros(0, 6))


class GrowsAside(Net):
    """A non-persistent buffer grows."""

    def more(self) -> None:
        self.b = _Grows(persistent=False, start=torch.zeros(0, 6))


class _Averages(_Buffers):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.seen = mean if self.seen is None else 0.9 * self.seen + 0.1 * mean
        return super().forward(x - self.seen)


class Averages(Net):
    """A running mean in a non-persistent buffer that starts as None."""

    def more(self) -> None:
        self.b = _Averages(persistent=False)


class AveragesKept(Net):
    """A running mean in a persistent buffer that starts as None."""

    def more(self) -> None:
        self.b = _Averages()


class _Remembers(_Buffers):
    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.linspace(0, 1, 6, dtype=x.dtype)
        return super().forward(x + self.seen)


class Remembers(Net):
    """A table in a buffer that starts as None."""

    def more(self) -> None:
        self.b = _Remembers()


class _Hooked(nn.Linear):
    """A backward hook appends to ``calls``."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.calls: list[int] = []
        self.register_full_backward_hook(lambda module, into, out: self.calls.append(1))


class _ReadsCount(_Hooked):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + len(self.calls))


class HookNotes(Net):
    """A backward hook counts in a list that nobody reads."""

    def more(self) -> None:
        self.b = _Hooked()


class HookCounts(Net):
    """A backward hook counts, and the next forward reads the count."""

    def more(self) -> None:
        self.b = _ReadsCount()


class _Fading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: _Fades) -> Tensor:
        ctx.module = module
        return x * module.factor

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.module.factor.mul_(0.9)
        return g, None


class _Fades(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("factor", torch.ones(()))
        self.factor: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Fading.apply(super().forward(x), self)
        return out


class FunctionFades(Net):
    """An autograd Function changes a buffer in its backward."""

    def more(self) -> None:
        self.b = _Fades()


class HookCools(nn.Module):
    """A backward hook of ``b`` changes a buffer of the root, which the root's own code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 16)
        self.register_buffer("warm", torch.ones(()))
        self.b.register_full_backward_hook(self._cool)

    def _cool(self, *_: Any) -> None:
        self.warm.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.b(self.a(x))) / self.warm)
        return out


class TensorHookCools(HookCools):
    """A forward hook registers a tensor hook, which changes the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.b._backward_hooks.clear()
        self.b.register_forward_hook(self._put)

    def _put(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._cool)


class Equilibrium(nn.Module):
    """Its backward solves for a fixed point with gradients that a tensor hook takes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), Solves(), nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.a(x)))
        return out


class Solves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.w(x))
        if z.requires_grad:
            z0 = z.detach().requires_grad_()
            f0 = torch.tanh(self.w(z0))
            z.register_hook(lambda g: g + torch.autograd.grad(f0, z0, g, retain_graph=True)[0])
        return z


class Differentiates(nn.Module):
    """Its forward takes the gradient of one of its parts with torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        out: Tensor = self.head(y + torch.func.grad(lambda v: self.b(v).tanh().sum())(y))
        return out


class Empty(nn.Module):
    """A layer without outputs, and a layer without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 16)
        with warnings.catch_warnings(action="ignore"):  # a layer of size 0 has nothing to initialize
            self.none, self.some = nn.Linear(6, 0, bias=False), nn.Linear(0, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.b(self.a(x)))
        out: Tensor = self.head(y) + self.some(self.none(y))
        return out


class MakesParameter(Net):
    """The first forward makes a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.b, "late"):
            self.b.late = nn.Parameter(torch.ones(6))
        return self.head(self.b(self.a(x)) * self.b.late)


class MakesModule(Net):
    """The first forward makes a module and moves it."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(6, 6).to(x)
        return self.head(self.late(self.b(self.a(x))))


class ReplacesParameter(Net):
    """The forward ties two layers, which is too late."""

    def forward(self, x: Tensor) -> Tensor:
        self.b.weight = self.a.weight
        return self.head(self.b(self.a(x)))


class _Refers(nn.Linear):
    """A layer that uses a tensor of another one through a reference that torch does not see."""

    def __init__(self, other: list[nn.Module], attr: str, called: bool = False) -> None:
        super().__init__(6, 6)
        self.other = lambda: other[0]
        self.attr, self.called = attr, called

    def forward(self, x: Tensor) -> Tensor:
        if self.called:
            return super().forward(self.other()(x))
        return super().forward(x + getattr(self.other(), self.attr).sum())


class Refers(Net):
    """The head uses a weight of an early layer."""

    attr, called = "weight", False

    def more(self) -> None:
        self.a.register_buffer("table", torch.linspace(0, 1, 6))
        self.head = nn.Sequential(_Refers([self.a], self.attr, self.called), nn.Linear(6, 3))


class RefersToBuffer(Refers):
    """The head uses a buffer of an early layer."""

    attr = "table"


class RefersByCall(Refers):
    """The head calls an early layer."""

    called = True


class Ensemble(Net):
    """vmap over copies of layers, which the forward stacks."""

    def more(self) -> None:
        self.several = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        stacked, _ = torch.func.stack_module_state([*self.several])
        base = copy.deepcopy(self.several[0]).to("meta")
        out = torch.vmap(lambda p: torch.func.functional_call(base, p, (h,)))(stacked)
        return self.head(self.b(out.sum(0)))


class _Wordless(nn.Linear):
    def extra_repr(self) -> str:
        raise AttributeError("it has no words")


class Wordless(Net):
    """A layer that cannot be printed."""

    def more(self) -> None:
        self.b = _Wordless(6, 6)


class _Single(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there can be only one")


class Single(Net):
    """A layer that refuses to be copied."""

    def more(self) -> None:
        self.b = _Single(6, 6)
