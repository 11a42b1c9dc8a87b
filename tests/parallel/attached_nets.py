"""Nets with something attached to a weight, a module or a call that exists in one process only."""

from __future__ import annotations

import copy
import ctypes
import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.python_state_nets import Net


class NodeHooked(Net):
    """A hook on the autograd node that accumulates a weight's gradient."""

    def more(self) -> None:
        w = self.b.weight
        self.node: Any = w.expand_as(w).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.node.register_prehook(lambda grads: (grads[0] * 0.5,))


class TwoHooked(Net):
    """A hook on two weights together, which waits for the autograd nodes that existed in the constructor."""

    def more(self) -> None:
        torch.autograd.graph.register_multi_grad_hook([self.a.weight, self.b.weight], lambda grads: None)


class _Halves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is F.linear else out


class FunctionMode(Net):
    """The forward runs a layer under a torch function mode."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with _Halves():
            h = self.b(h)
        return self.head(h)


class _HalvesProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.addmm.default else out


class DispatchMode(Net):
    """The forward runs a layer under a torch dispatch mode, below autograd."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with _HalvesProducts():
            h = self.b(h)
        return self.head(h)


class _Inside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with _Halves():
            return super().forward(x)


class ModeInside(Net):
    """A layer enters a mode itself."""

    def more(self) -> None:
        self.b = _Inside(6, 6)


class Replaced(Net):
    """A function of ``torch.nn.functional`` is replaced while a layer runs."""

    def forward(self, x: Tensor) -> Tensor:
        h, plain = self.a(x), F.linear
        F.linear = lambda *args: plain(*args) * 0.5
        try:
            return self.head(self.b(h))
        finally:
            F.linear = plain


class _Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + x.tanh()


class ReplacedInTorch(Net):
    """A function of ``torch`` is replaced while a layer runs."""

    def more(self) -> None:
        self.b = _Tanh()

    def forward(self, x: Tensor) -> Tensor:
        h, plain = self.a(x), torch.tanh
        torch.tanh = lambda *args: plain(*args) * 0.5
        try:
            return self.head(self.b(h))
        finally:
            torch.tanh = plain


class Exchanged(ReplacedInTorch):
    """A function of ``torch`` is replaced by another function of ``torch``."""

    def forward(self, x: Tensor) -> Tensor:
        h, plain = self.a(x), torch.tanh
        torch.tanh = torch.sigmoid
        try:
            return self.head(self.b(h))
        finally:
            torch.tanh = plain


GAIN = 1.0


class _Gained(nn.Module):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain * GAIN)


class GainOfModule(Net):
    """An attribute of a layer has another value while the layer runs."""

    def more(self) -> None:
        self.b = _Gained()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.b.gain = 0.5
        try:
            return self.head(self.b(h))
        finally:
            del self.b.gain


class GainOfClass(GainOfModule):
    """A class attribute has another value while the layer runs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        _Gained.gain = 0.5
        try:
            return self.head(self.b(h))
        finally:
            _Gained.gain = 1.0


class GainOfFile(GainOfModule):
    """A global variable has another value while the layer runs."""

    def forward(self, x: Tensor) -> Tensor:
        global GAIN
        h, GAIN = self.a(x), 0.5
        try:
            return self.head(self.b(h))
        finally:
            GAIN = 1.0


class GainByCall(GainOfModule):
    """A layer runs twice, with another value of an attribute each time; the last value stays."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for n in (1, 2):
            self.b.gain = n / 2
            h = self.b(h)
        return self.head(h)


class _Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = super().__call__(x * 1.5)
        return y + 1


class OwnCall(Net):
    """A module defines its own ``__call__``."""

    def more(self) -> None:
        self.b = _Called(6, 6)


class Slopes(Net):
    """A module draws random slopes into a tensor that torch has already saved for the backward."""

    def more(self) -> None:
        self.b = nn.Sequential(nn.Linear(6, 6), nn.RReLU())


class ReplacedMethod(ReplacedInTorch):
    """A method of ``Tensor`` is replaced while a layer runs."""

    def forward(self, x: Tensor) -> Tensor:
        h, plain = self.a(x), Tensor.tanh
        Tensor.tanh = lambda *args: plain(*args) * 0.5
        try:
            return self.head(self.b(h))
        finally:
            Tensor.tanh = plain


class ReplacedForward(ReplacedInTorch):
    """The forward of a class is replaced while a layer runs."""

    def forward(self, x: Tensor) -> Tensor:
        h, plain = self.a(x), _Tanh.forward
        _Tanh.forward = lambda *args: plain(*args) * 0.5
        try:
            return self.head(self.b(h))
        finally:
            _Tanh.forward = plain


class Dual(Net):
    """A layer runs on dual numbers of forward-mode differentiation."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(self.b(forward_ad.make_dual(h, torch.ones_like(h))))
            return self.head(value + tangent)


class _ReadsOwn(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("shift", torch.zeros(6, requires_grad=True))
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.shift.grad is not None:
            x = x - self.shift.grad
        return super().forward(x + self.shift)


class BufferGradient(Net):
    """A buffer has a gradient, which the next forward reads."""

    def more(self) -> None:
        self.b = _ReadsOwn()


class _ReadsKept(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None and self.last.grad is not None:
            x = x + self.last.grad.square().sum().sqrt()
        h = super().forward(x)
        if h.requires_grad:
            h.retain_grad()
            self.last = h
        return h


class KeptGradient(Net):
    """The next forward reads the gradient of a tensor that the module keeps."""

    def more(self) -> None:
        self.b = _ReadsKept()


class _Queue(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: _Queues) -> Tensor:
        ctx.owner = owner
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        torch.autograd.Variable._execution_engine.queue_callback(ctx.owner.done)
        return g, None


class _Queues(nn.Linear):
    def done(self) -> None:
        assert self.weight.grad is not None
        self.weight.grad.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Queue.apply(super().forward(x), self)
        return out


class Queued(Net):
    """A callback queued for the end of the backward changes a gradient."""

    def more(self) -> None:
        self.b = _Queues(6, 6)


class _HoldsTied(nn.Linear):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__(6, 6)
        self.others = [weakref.ref(other)]
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        other = self.others[0]()
        assert other is not None
        return super().forward(x) * (0.5 if other.weight is self.weight else 1.0)


class HoldsTied(Net):
    """A late layer keeps a weak reference to an early one and asks whether they share a weight."""

    def more(self) -> None:
        self.head = nn.Sequential(_HoldsTied(self.a), nn.Linear(6, 3))


class _Weak(nn.Linear):
    def __init__(self, other: nn.Linear, root: nn.Module) -> None:
        super().__init__(6, 6)
        self.other, self.roots = weakref.ref(other), [weakref.proxy(root)]

    def forward(self, x: Tensor) -> Tensor:
        other = self.other()
        assert other is not None
        return super().forward(x) * self.roots[0].share + other.weight.mean()


class Weak(Net):
    """A layer reaches an early one and the root by weak references."""

    share = 0.5

    def more(self) -> None:
        self.b = _Weak(self.a, self)


class _Several(nn.Module):
    """An ensemble as in torch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.base = [copy.deepcopy(self.several[0]).to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        params, buffers = torch.func.stack_module_state([*self.several])
        call = lambda p, b, x: torch.func.functional_call(self.base[0], (p, b), (x,))  # noqa: E731
        return torch.vmap(call, (0, 0, None))(params, buffers, x).mean(0)


class Ensemble(Net):
    """The base of an ensemble is on the meta device, in a list."""

    def more(self) -> None:
        self.b = _Several()


class SharedLstm(nn.Module):
    """Two recurrent layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.LSTM(6, 6, batch_first=True) for _ in range(2))
        self.b.weight_hh_l0 = self.a.weight_hh_l0
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.a(x)[0])[0])
        return out


class _TakesOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.first = nn.Identity()
        out: Tensor = self.second(self.first(x))
        return out


class TakesOut(Net):
    """A module removes one of its own parts."""

    def more(self) -> None:
        self.b = _TakesOut()


class _Anchored(nn.Linear):
    start: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.start is None:
            self.start = self.weight.detach().clone()
        return F.linear(x, 2 * self.weight - self.start, self.bias)


class Anchored(Net):
    """A layer keeps a copy of its weights from the first call."""

    def more(self) -> None:
        self.b = _Anchored(6, 6)


class _Scaled(nn.Linear):
    @functools.cached_property
    def scale(self) -> Tensor:
        return self.weight.detach().norm()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.scale


class CachedProperty(Net):
    """A layer divides by a norm that it computes once and caches."""

    def more(self) -> None:
        self.b = _Scaled(6, 6)


class OneShot(Net):
    """A hook doubles the first result and then removes itself."""

    def more(self) -> None:
        handles = [self.b.register_forward_hook(lambda module, args, out: (handles.pop().remove(), out * 2)[1])]


class _Table(nn.Linear):
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 6, dtype=x.dtype, device=x.device)
        return super().forward(x + self.table)


class KeepsTable(Net):
    """A table is made once, from values that do not change."""

    def more(self) -> None:
        self.b = _Table(6, 6)


class CountsInC(Net):
    """An integer of ``ctypes`` counts the calls."""

    def more(self) -> None:
        self.calls = ctypes.c_int(0)

    def factor(self) -> Any:
        self.calls.value += 1
        return 1 / self.calls.value
