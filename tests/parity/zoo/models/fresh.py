"""Fresh odd models."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.zoo.case import ABCD, D, Net, block, image, odd, sequence, tokens


# 1 --- autograd nodes
@odd(*ABCD)
class AccumulateNodeHook(Net):
    """A hook on the node that accumulates a weight's gradient halves it, set in the constructor."""

    def extra(self) -> None:
        self.nodes = []
        w = self.b[0].weight
        node = w.expand_as(w).grad_fn.next_functions[0][0]
        node.register_hook(lambda i, o: (w.grad.mul_(0.5), None)[1])
        self.nodes.append(node)


@odd(*ABCD)
class AccumulateNodePreHook(Net):
    """A hook before the node that accumulates a weight's gradient."""

    def extra(self) -> None:
        w = self.b[0].weight
        self.node = w.view_as(w).grad_fn.next_functions[0][0]
        self.node.register_prehook(lambda o: (o[0] * 0.5,))


@odd(*ABCD)
class MultiGradHook(Net):
    """A hook for several weights together counts into a number that scales the next forward."""

    def extra(self) -> None:
        self.seen = 0
        torch.autograd.graph.register_multi_grad_hook([self.b[0].weight, self.c[0].weight], self._count)

    def _count(self, grads: Any) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.seen)


class _Queue(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        owner = ctx.owner
        torch.autograd.Variable._execution_engine.queue_callback(lambda: owner.done())
        return g, None


class _Queues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def done(self) -> None:
        self.lin.weight.grad.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return _Queue.apply(self.lin(x).tanh(), self)


@odd(*ABCD)
class QueuedCallback(Net):
    """A callback at the end of a backward halves what has been accumulated in a weight."""

    def extra(self) -> None:
        self.b = _Queues()


class _Materialize(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> Any:
        if h is None:
            return g * 5
        return g * 2 + h * 3 if g is not None else h * 3


class _Mat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        return _Materialize.apply(self.lin(x).tanh())


@odd(*ABCD)
class GradientIsNone(Net):
    """A Function asks whether the gradient of its second result is None; its module's second result goes unused."""

    def extra(self) -> None:
        self.b = _Mat()

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.b(self.a(x))
        return self.d(self.c(h))


@odd(*ABCD)
class GradientIsNoneLate(Net):
    """The same, its second result used by a later stage in a way that takes no gradient."""

    def extra(self) -> None:
        self.b = _Mat()

    def forward(self, x: Tensor) -> Tensor:
        h, k = self.b(self.a(x))
        return self.d(self.c(h) + k.detach())


class _Needs(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        scale = 1.0 if all(ctx.needs_input_grad) else 0.5
        return g @ w * scale, g.T @ x * scale


class _NeedsLin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return _Needs.apply(x, self.w)


@odd(*ABCD)
class AsksNeeds(Net):
    """A Function gives half where not all its inputs need a gradient."""

    def extra(self) -> None:
        self.a, self.c = _NeedsLin(), _NeedsLin()


class _CountsBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, box: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.box = box
        return x @ w.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        ctx.box.calls += 1
        s = 1.0 / ctx.box.calls
        return g @ w, g.T @ x * s, None


class _CountLin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D) / 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return _CountsBackward.apply(x, self.w, self)


@odd(*ABCD)
class BackwardCounts(Net):
    """A Function's backward counts its calls, and divides by the number."""

    def extra(self) -> None:
        self.b, self.c = _CountLin(), _CountLin()


@odd(*ABCD)
class HookFreezes(Net):
    """A hook after accumulation takes a weight's gradient away: None."""

    def extra(self) -> None:
        def gone(p: Tensor) -> None:
            p.grad = None

        self.b[0].weight.register_post_accumulate_grad_hook(gone)


@odd(*ABCD)
class StepsInBackward(Net):
    """A hook after accumulation takes a step of its own and clears the gradient."""

    def extra(self) -> None:
        def take(p: Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        self.b[0].weight.register_post_accumulate_grad_hook(take)


@odd(*ABCD)
class HookReadsWeight(Net):
    """A hook on a weight keeps the gradient only where the weight is large, and reads it."""

    def extra(self) -> None:
        w = self.b[0].weight
        w.register_hook(lambda g: g * (w.detach().abs() > 0.1))


@odd(*ABCD)
class HookNorm(Net):
    """A hook divides a weight's gradient by its norm: not linear."""

    def extra(self) -> None:
        self.b[0].weight.register_hook(lambda g: g / (1 + g.norm()))


@odd(*ABCD)
class HookOnView(Net):
    """The hook is on a view of a weight that the forward makes, and reads the whole."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.b[0].weight.view(-1)
        w.register_hook(lambda g: g * 0.5)
        h = F.linear(self.a(x), w.view(D, D), self.b[0].bias).tanh()
        return self.d(self.c(h))


# 2 --- modes and contexts
class _Rescales(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is F.linear else out


@odd(*ABCD)
class FunctionMode(Net):
    """Two blocks under a TorchFunctionMode that halves what linear gives."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with _Rescales():
            h = self.c(self.b(h))
        return self.d(h)


class _ModeInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        with _Rescales():
            return self.net(x)


@odd(*ABCD)
class FunctionModeInside(Net):
    """The same within a module."""

    def extra(self) -> None:
        self.b = _ModeInside()


class _Halves(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.tanh.default else out


@odd(*ABCD)
class DispatchMode(Net):
    """Two blocks under a TorchDispatchMode that halves tanh."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with _Halves():
            h = self.c(self.b(h))
        return self.d(h)


@odd(*ABCD)
class ParametrizedCached(Net):
    """Two blocks of one parametrized weight under parametrize.cached()."""

    def extra(self) -> None:
        nn.utils.parametrizations.weight_norm(self.b[0])
        nn.utils.parametrizations.weight_norm(self.c[0])

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.d(self.c(self.b(self.b(self.a(x)))))


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.ones(D, 1))

    def forward(self, w: Tensor) -> Tensor:
        return w * self.s


@odd(*ABCD)
class SharedParametrization(Net):
    """One parametrization, with a weight of its own, on two layers of different stages."""

    def extra(self) -> None:
        one = _Scale()
        parametrize.register_parametrization(self.a[0], "weight", one)
        parametrize.register_parametrization(self.c[0], "weight", one)


@odd(*ABCD)
class SpectralTwice(Net):
    """A layer with spectral norm is called twice in a forward."""

    def extra(self) -> None:
        nn.utils.parametrizations.spectral_norm(self.b[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.b(self.a(x)))))


class _HasShared(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.lin(x)).tanh()


@odd(*ABCD)
class SharedSpectral(Net):
    """One layer with spectral norm is part of two blocks of different stages."""

    def extra(self) -> None:
        shared = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))
        self.a, self.c = _HasShared(shared), _HasShared(shared)


@odd(*ABCD)
class SharedNormAcross(Net):
    """One batch norm is part of two blocks of different stages."""

    def extra(self) -> None:
        shared = nn.BatchNorm1d(D)
        self.a, self.c = _HasShared(shared), _HasShared(shared)


# 3 --- recurrent
class _WeightDrop(nn.Module):
    """As in AWD-LSTM: the recurrent weight is made anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D, batch_first=True)
        raw = self.lstm.weight_hh_l0
        del self.lstm._parameters["weight_hh_l0"]
        self.raw = nn.Parameter(raw.data)
        self.register_buffer("keep", (torch.arange(4 * D * D).view(4 * D, D) % 3 > 0).to(raw.dtype))
        self._set()

    def _set(self) -> None:
        self.lstm.weight_hh_l0 = self.raw * self.keep

    def forward(self, x: Tensor) -> Tensor:
        self._set()
        return self.lstm(x)[0]


@sequence(*ABCD)
class WeightDrop(Net):
    """An LSTM whose recurrent weight is made anew in each forward, as in AWD-LSTM."""

    def extra(self) -> None:
        self.b = _WeightDrop()


class _Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 2 * D, 2, proj_size=D, batch_first=True, bidirectional=False)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        return self.lstm(x)[0]


@sequence(*ABCD)
class ProjectedLstm(Net):
    """LSTMs with projection, flattened in each forward, of which two share their recurrent weights."""

    def extra(self) -> None:
        self.b, self.c = _Projected(), _Projected()
        self.c.lstm.weight_hh_l0 = self.b.lstm.weight_hh_l0
        self.c.lstm.weight_ih_l1 = self.b.lstm.weight_ih_l1


# 4 --- aliasing
class _Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(D) / 3)
        self.w = nn.Parameter(torch.randn(D, 2 * D) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.as_strided(self.w, (D, D), (2 * D, 1), 0).T + self.other).tanh()


@odd(*ABCD)
class StridedFromZero(Net):
    """A weight's columns by as_strided, counted from the beginning of its memory."""

    def extra(self) -> None:
        self.b = _Strided()


@odd(*ABCD)
class OneVector(Net):
    """All weights are pieces of one vector, by vector_to_parameters in the constructor."""

    def extra(self) -> None:
        v = nn.utils.parameters_to_vector(self.parameters()).detach() * 0.9
        nn.utils.vector_to_parameters(v, self.parameters())


@tokens("embed", "b", "c", "head")
class TiesInForward(nn.Module):
    """The head is given the embedding's weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.b, self.c = nn.Embedding(8, D), block(), block()
        self.head = nn.Linear(D, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight = self.embed.weight
        return self.head(self.c(self.b(self.embed(x))))


@tokens("embed", "b", "c", "head")
class AsksWhetherTied(nn.Module):
    """The glue scales if head and embedding are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.b, self.c = nn.Embedding(8, D), block(), block()
        self.head = nn.Linear(D, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.embed(x)))
        if self.head.weight is self.embed.weight:
            h = h * D**-0.5
        return self.head(h)


class _HoldsTable(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "table", table)
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        same = self.lin.weight is self.table.weight or self.lin.weight.data_ptr() == self.table.weight.data_ptr()
        return self.lin(x) * (0.5 if same else 1.0)


@odd(*ABCD)
class AsksMemory(Net):
    """A module asks whether its weight has another layer's memory."""

    def extra(self) -> None:
        self.c = _HoldsTable(self.a[0])
        self.c.lin.weight = self.a[0].weight


class _HoldsTied(_HoldsTable):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table.weight * 0.5, self.lin.bias) + self.lin(x)


@odd(*ABCD)
class UsesHeldTie(Net):
    """A module computes with another's weight, which is its own too."""

    def extra(self) -> None:
        self.c = _HoldsTied(self.a[0])
        self.c.lin.weight = self.a[0].weight


class _HeldGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None and self.last.grad is not None:
            x = x + self.last.grad.square().sum().sqrt()
        h = self.lin(x).tanh()
        if h.requires_grad and self.training:
            h.retain_grad()
            self.last = h
        return h


@odd(*ABCD)
class HeldGradient(Net):
    """A module keeps its last result, whose gradient its next forward reads."""

    def extra(self) -> None:
        self.b = _HeldGradient()


class _Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(), block()

    def forward(self, x: Tensor) -> Tensor:
        self.first = nn.Identity()
        return self.second(self.first(x))


@odd(*ABCD)
class ReplacedAtOnce(Net):
    """A module takes a part of itself out at its first call."""

    def extra(self) -> None:
        self.b = _Replaces()


class _IsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        w = self.lin.weight
        good = isinstance(w, nn.Parameter) and w.is_leaf and w.requires_grad and w.grad_fn is None and type(w) is nn.Parameter
        good = good and w.is_contiguous() and w.storage_offset() == 0 and w._base is None
        good = good and w.untyped_storage().nbytes() == w.numel() * w.element_size()
        return self.lin(x).tanh() * (1.0 if good else 0.5)


@odd(*ABCD)
class AsksItsWeight(Net):
    """A module asks whether its weight is a leaf, a parameter, and the whole of its memory."""

    def extra(self) -> None:
        self.b = _IsParameter()


class _ByRegistry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        w = self.lin._parameters["weight"]
        b = dict(self.named_parameters())["lin.bias"]
        return F.linear(x, w, b).tanh() * (self.get_parameter("lin.weight").norm() / sum(p.numel() for p in self.parameters()))


@odd(*ABCD)
class ByRegistry(Net):
    """Weights are taken out of _parameters, named_parameters and get_parameter; the glue does so too."""

    def extra(self) -> None:
        self.b = _ByRegistry()

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.a(x)))
        return self.d(h * dict(self.named_parameters())["a.0.bias"].exp()) + self.get_parameter("d.weight").mean()


class _Equalized(nn.Linear):
    """As in StyleGAN: the weight is a property."""

    def __init__(self) -> None:
        super().__init__(D, D)
        w = self.weight
        del self._parameters["weight"]
        self.raw = nn.Parameter(w.data * 3)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "raw" in self._parameters:
            return self.raw / 3
        return super().__getattr__(name)


@odd(*ABCD)
class MadeByGetattr(Net):
    """A layer's weight is made by __getattr__ of another."""

    def extra(self) -> None:
        self.b, self.c = _Equalized(), _Equalized()


@odd(*ABCD)
class BufferNeedsGradient(Net):
    """A buffer that requires a gradient, which nobody steps."""

    def extra(self) -> None:
        self.register_buffer("shift", torch.randn(D, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)) + self.shift))


class _BufferGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("shift", torch.zeros(D, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        if self.shift.grad is not None:
            x = x - self.shift.grad
        return self.lin(x + self.shift).tanh()


@odd(*ABCD)
class ReadsBufferGradient(Net):
    """A buffer that requires a gradient, which the next forward reads."""

    def extra(self) -> None:
        self.b = _BufferGrad()


# 5 --- state
class _Swaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(), block()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            self.first = nn.Identity()
        return self.second(self.first(x))


@odd(*ABCD)
class ReplacedLate(Net):
    """A module replaces a part of itself at its third call."""

    def extra(self) -> None:
        self.b = _Swaps()


class _OneShot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()
        self.handle = self.net.register_forward_hook(self._once)

    def _once(self, m: Any, i: Any, o: Tensor) -> Tensor:
        self.handle.remove()
        return o * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@odd(*ABCD)
class OneShotHook(Net):
    """A hook doubles the first result and takes itself away."""

    def extra(self) -> None:
        self.b = _OneShot()


class _Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(), block()

    def forward(self, x: Tensor) -> Tensor:
        kept: dict[str, Tensor] = {}
        handles = [m.register_forward_hook(lambda m, i, o, n=n: kept.__setitem__(n, o)) for n, m in self.named_children()]
        out = self.second(self.first(x))
        for h in handles:
            h.remove()
        return out + kept["first"]


@odd(*ABCD)
class HooksForACall(Net):
    """Hooks are set for the time of a forward, within a module and in the glue."""

    def extra(self) -> None:
        self.b = _Collects()

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handle = self.a.register_forward_hook(lambda m, i, o: kept.append(o))
        out = self.c(self.b(self.a(x)))
        handle.remove()
        return self.d(out + kept[0])


class _Anchor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.start: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.start is None:
            self.start = self.lin.weight.detach().clone()
        return F.linear(x, 2 * self.lin.weight - self.start, self.lin.bias).tanh()


@odd(*ABCD)
class Anchored(Net):
    """A module keeps its weights as they were at the first forward."""

    def extra(self) -> None:
        self.b = _Anchor()


class _CachedProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    @functools.cached_property
    def scale(self) -> Tensor:
        return self.lin.weight.detach().norm()

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) / self.scale).tanh()


@odd(*ABCD)
class CachedPropertyOfWeight(Net):
    """A cached_property of a weight: its first norm."""

    def extra(self) -> None:
        self.b = _CachedProperty()


class _Redraws(nn.Module):
    """As Performer: random features, drawn anew at each third call."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("features", torch.randn(D, D) / 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and int(self.calls) % 3 == 2:
            self.features.copy_(torch.randn(D, D) / 3)
        self.calls += 1
        return self.lin(x @ self.features).tanh()


@odd(*ABCD)
class RedrawnFeatures(Net):
    """Random features in a buffer are drawn anew at each third call, as in Performer."""

    def extra(self) -> None:
        self.b = _Redraws()


class _RandomInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * random.random()


@odd(*ABCD)
class RandomInside(Net):
    """Two modules of different stages are scaled by random.random(), each with a draw of its own."""

    def extra(self) -> None:
        self.b, self.c = _RandomInside(), _RandomInside()


class _NumpyRandomInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        return x if np.random.uniform() < 0.3 else self.net(x)


@odd(*ABCD)
class LayerDropByNumpy(Net):
    """Blocks are left out by np.random.uniform(), as in fairseq."""

    def extra(self) -> None:
        self.b, self.c = _NumpyRandomInside(), _NumpyRandomInside()


class _Renorm(nn.BatchNorm1d):
    """Batch renormalization."""

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(0), x.std(0, unbiased=False) + self.eps
        run_std = (self.running_var + self.eps).sqrt()
        r = (std.detach() / run_std).clamp(1 / 3, 3)
        d = ((mean.detach() - self.running_mean) / run_std).clamp(-5, 5)
        out = (x - mean) / std * r + d
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(mean, 0.1)
                self.running_var.lerp_(std**2, 0.1)
                self.num_batches_tracked += 1
        return out * self.weight + self.bias


@odd(*ABCD)
class BatchRenorm(Net):
    """Batch renormalization: a subclass of BatchNorm1d that reads its running statistics in training."""

    def extra(self) -> None:
        self.b = nn.Sequential(nn.Linear(D, D), _Renorm(D))


class _Ghost(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(_Ghost, self).forward(p) for p in x.chunk(2)])


@odd(*ABCD)
class GhostNorm(Net):
    """Ghost batch norm: each half of a micro batch by itself."""

    def extra(self) -> None:
        self.b = nn.Sequential(nn.Linear(D, D), _Ghost(D))


@odd(*ABCD)
class MomentumFalls(Net):
    """The momentum of a batch norm falls with its calls; the norm is put to sleep at the fourth."""

    def extra(self) -> None:
        self.b = nn.Sequential(nn.Linear(D, D), _Falls(D))


class _Falls(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        self.momentum = 1 / (2 + int(self.num_batches_tracked))
        if int(self.num_batches_tracked) >= 3:
            self.eval()
        return super().forward(x)


class _Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("table", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.cat([self.table, self.table.new_ones(1) * len(self.table)])
        return self.lin(x).tanh() * self.table.mean()


@odd(*ABCD)
class BufferGrows(Net):
    """A buffer becomes longer at each call."""

    def extra(self) -> None:
        self.b = _Grows()


class _FakeQuant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.fq = torch.ao.quantization.FakeQuantize.with_args(
            observer=torch.ao.quantization.MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127,
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=0)()

    def forward(self, x: Tensor) -> Tensor:
        w = self.fq(self.lin.weight.float()).to(x.dtype)
        return F.linear(x, w, self.lin.bias).tanh()


@odd(*ABCD)
class FakeQuantized(Net):
    """Weights are quantised for training, with an observer whose buffers get their shape at the first call."""

    def extra(self) -> None:
        self.b = _FakeQuant()


class _LocalStep(nn.Module):
    """An inner loss that is stepped by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.probe = block(), nn.Linear(D, 1)
        self.own = torch.optim.SGD(self.probe.parameters(), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        if self.training:
            with torch.enable_grad():
                loss = (self.probe(torch.ones(1, D, dtype=x.dtype, device=x.device)) - 1).square().sum()
                g = torch.autograd.grad(loss, list(self.probe.parameters()))
            for p, d in zip(self.probe.parameters(), g, strict=True):
                p.grad = d
            self.own.step()
        return h * self.probe.weight.detach()


@odd(*ABCD)
class OwnOptimizer(Net):
    """A module steps a part of itself by an optimizer of its own in its forward."""

    def extra(self) -> None:
        self.b = _LocalStep()


class _LocalLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.probe = block(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x.detach())
        if self.training and torch.is_grad_enabled():
            self.probe(h).square().sum().backward()
        return h.detach()


@odd(*ABCD)
class LocalLosses(Net):
    """Blocks learn by losses of their own, whose backward is called in the forward."""

    def extra(self) -> None:
        self.b, self.c = _LocalLoss(), _LocalLoss()


# 6 --- functional
class _Maml(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        params = dict(self.net.named_parameters())

        def inner(p: Any, one: Tensor) -> Tensor:
            return torch.func.functional_call(self.net, p, (one,)).square().sum()

        def adapted(one: Tensor) -> Tensor:
            g = torch.func.grad(inner)(params, one)
            return torch.func.functional_call(self.net, {n: p - 0.1 * g[n] for n, p in params.items()}, (one,))

        return torch.vmap(adapted)(x)


@odd(*ABCD)
class AdaptedPerSample(Net):
    """A step of gradient descent for each sample within the forward, as MAML takes."""

    def extra(self) -> None:
        self.b = _Maml()


class _MamlGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ones = torch.ones(1, D, dtype=x.dtype, device=x.device)
            loss = self.net(ones).square().sum()
            params = dict(self.net.named_parameters())
            g = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        fast = {n: p - 0.1 * d for (n, p), d in zip(params.items(), g, strict=True)}
        return torch.func.functional_call(self.net, fast, (x,))


@odd(*ABCD)
class InnerStep(Net):
    """An inner step by autograd.grad with create_graph, then functional_call."""

    def extra(self) -> None:
        self.b = _MamlGrad()


class _Jvp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()
        self.register_buffer("v", torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        out, tangent = torch.func.jvp(self.net, (x,), (self.v.expand_as(x),))
        return out + 0.1 * tangent


@odd(*ABCD)
class Jvp(Net):
    """A directional derivative by torch.func.jvp is added, within a module."""

    def extra(self) -> None:
        self.b = _Jvp()


class _Adjoint(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Any, *params: Tensor) -> Tensor:
        ctx.f, ctx.params = f, params
        with torch.no_grad():
            y = x + f(x)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + ctx.f(x)
            gx, *gp = torch.autograd.grad(y, (x, *ctx.params), g)
        return (gx, None, *gp)


class _Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = block()

    def forward(self, x: Tensor) -> Tensor:
        return _Adjoint.apply(x, self.f, *self.f.parameters())


@odd(*ABCD)
class Adjoint(Net):
    """A Function whose backward runs a module again and asks for its weights' gradients, as of reversible nets."""

    def extra(self) -> None:
        self.b = _Reversible()


class _NumpyFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = np.tanh(x.detach().cpu().numpy())
        ctx.out = out
        return torch.from_numpy(out).to(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(g.cpu().numpy() * (1 - ctx.out**2)).to(g)


class _ByNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return _NumpyFunction.apply(self.lin(x))


@odd(*ABCD)
class NumpyFunction(Net):
    """A Function that computes in numpy both ways."""

    def extra(self) -> None:
        self.b = _ByNumpy()


# 7 --- constructors
@odd(*ABCD)
class SkipInit(Net):
    """Layers by skip_init and on meta with to_empty, initialised afterwards."""

    def extra(self) -> None:
        self.b = nn.utils.skip_init(nn.Linear, D, D)
        nn.init.orthogonal_(self.b.weight)
        nn.init.zeros_(self.b.bias)
        with torch.device("meta"):
            self.c = block()
        self.c.to_empty(device="cpu")
        self.c[0].reset_parameters()


@odd(*ABCD)
class LoadedFromBytes(Net):
    """A block is written by torch.save and read again when the model is made."""

    def extra(self) -> None:
        f = io.BytesIO()
        torch.save(self.b.state_dict(), f)
        f.seek(0)
        self.c.load_state_dict(torch.load(f))


@odd(*ABCD)
class ThreadedInit(Net):
    """Blocks are initialised in threads."""

    def extra(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda m: nn.init.constant_(m.weight, 0.05), [self.a[0], self.b[0], self.c[0]]))


@odd(*ABCD)
class FittedInit(Net):
    """The constructor fits a block by some steps of SGD."""

    def extra(self) -> None:
        opt = torch.optim.SGD(self.b.parameters(), 0.1)
        x = torch.linspace(-1, 1, 4 * D).view(4, D)
        for _ in range(5):
            opt.zero_grad()
            (self.b(x) - x).square().sum().backward()
            opt.step()
        opt.zero_grad()


@odd(*ABCD)
class RejectedInit(Net):
    """The constructor draws until a matrix is well conditioned, and keeps the number of draws."""

    def extra(self) -> None:
        self.draws = 0
        while True:
            w = torch.randn(D, D)
            self.draws += 1
            if torch.linalg.cond(w) < 12:
                break
        self.b[0].weight.data.copy_(w)


T = TypeVar("T")


class _Generic(nn.Module, Generic[T]):
    def __init__(self, kind: T) -> None:
        super().__init__()
        self.kind, self.net = kind, block()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Generic) and other.kind == self.kind and other is self

    def __hash__(self) -> int:
        return 1

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@odd(*ABCD)
class EqualHash(Net):
    """Generic modules with a hash that is the same for all."""

    def extra(self) -> None:
        self.b, self.c = _Generic[int](1), _Generic[int](1)


class _CopiesItself(nn.Module):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or block()
        self.copies = 0

    def __deepcopy__(self, memo: Any) -> nn.Module:
        out = _CopiesItself(nn.Sequential(nn.Linear(D, D), nn.Tanh()))
        out.net.load_state_dict(self.net.state_dict())
        out.copies = self.copies + 1
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / (1 + self.copies)


@odd(*ABCD)
class OwnDeepCopy(Net):
    """A module that copies itself in its own way, and counts that."""

    def extra(self) -> None:
        self.b = _CopiesItself()


@odd("net.a", "net.b", "net.c", "net.d")
class SymbolicTraced(nn.Module):
    """The model holds a GraphModule of torch.fx."""

    def __init__(self) -> None:
        super().__init__()
        self.net = fx.symbolic_trace(Net())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@odd("net.module.a", "net.module.b", "net.module.c", "net.module.d")
class InDataParallel(nn.Module):
    """The model is in nn.DataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.DataParallel(Net())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@odd(*ABCD)
class Coroutine(Net):
    """Blocks are called in coroutines."""

    async def _go(self, x: Tensor) -> Tensor:
        h = self.a(x)
        left, right = await asyncio.gather(self._one(self.b, h), self._one(self.c, h))
        return self.d(left + right)

    async def _one(self, m: nn.Module, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return m(x)

    def forward(self, x: Tensor) -> Tensor:
        return asyncio.run(self._go(x))


@odd(*ABCD)
class ForwardByProperty(Net):
    """forward is a property that gives a function."""

    @property
    def forward(self) -> Any:
        return lambda x: self.d(self.c(self.b(self.a(x)))) * 0.5


@odd("layers.0", "layers.1", "head")
class SharedLayers(nn.Module):
    """One layer three times in a ModuleList, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        one, two = block(), block()
        self.layers = nn.ModuleList([one, two, one, two])
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _Done(Exception):
    pass


@odd(*ABCD)
class RaisedValue(Net):
    """A value comes out of a block by an exception."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.b(self.a(x))
            raise _Done(self.c(h))
        except _Done as done:
            return self.d(done.args[0])


@odd(*ABCD)
class ScalarPromotes(Net):
    """Numbers of the root without dims, in another dtype than what they scale: they do not promote."""

    def extra(self) -> None:
        self.s = nn.Parameter(torch.tensor(1 / 3))
        self.register_buffer("t", torch.tensor(1 / 7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        k = h.float() * self.s * self.t
        h = h + k.to(h.dtype) + (1.0 if k.dtype == torch.float32 else 2.0)
        h = self.c(h)
        k = h.float() * self.s.double()
        return self.d(h + k.to(h.dtype) + (1.0 if k.dtype == torch.float32 else 2.0))


class _PromotesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.s = nn.Parameter(torch.tensor(1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        k = self.lin(x).float() * self.s
        return k.to(x.dtype) * (1.0 if k.dtype == torch.float32 else 2.0)


@odd(*ABCD)
class ScalarPromotesInside(Net):
    """The same within a module."""

    def extra(self) -> None:
        self.b = _PromotesInside()


@tokens("embed", "b", "c", "head")
class AdaptiveHead(nn.Module):
    """An adaptive softmax gives the logits, over factors of frequent and rare tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.b, self.c = nn.Embedding(8, D), block(), block()
        self.head = nn.AdaptiveLogSoftmaxWithLoss(D, 8, [3, 6], div_value=2.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.embed(x)))
        return self.head.log_prob(h.flatten(0, 1)).view(*x.shape, 8)


class _Cache(nn.Module):
    """Attention by pieces of the sequence, keys and values kept between them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.cache, outs = None, []
        for part in x.split(2, 1):
            q, k, v = self.qkv(part).chunk(3, -1)
            if self.cache is not None:
                k, v = (torch.cat([o, n], 1) for o, n in zip(self.cache, (k, v), strict=True))
            self.cache = (k, v)
            outs.append(F.scaled_dot_product_attention(q, k, v))
        return x + torch.cat(outs, 1)


@sequence(*ABCD)
class CachedKeys(Net):
    """Attention by pieces with a cache of keys, which stays behind after the forward."""

    def extra(self) -> None:
        self.b, self.c = _Cache(), _Cache()


class _Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n > self.longest:
            self.longest = n
            angle = torch.outer(torch.arange(n, device=x.device, dtype=x.dtype), torch.arange(1, D + 1, device=x.device, dtype=x.dtype))
            self.register_buffer("cos", angle.cos(), persistent=False)
        return self.lin(x * self.cos[:n]).tanh()


@sequence(*ABCD)
class RotaryGrows(Net):
    """Tables of angles are registered as buffers by the forward, and grow."""

    def extra(self) -> None:
        self.b = _Growing()


class _Ensemble(nn.Module):
    """torch's tutorial on ensembles."""

    def __init__(self) -> None:
        super().__init__()
        import copy

        self.models = nn.ModuleList(block() for _ in range(3))
        self.base = [copy.deepcopy(self.models[0]).to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        params, buffers = torch.func.stack_module_state(list(self.models))

        def call(p: Any, b: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(self.base[0], (p, b), (x,))

        return torch.vmap(call, (0, 0, None))(params, buffers, x).mean(0)


@odd(*ABCD)
class TutorialEnsemble(Net):
    """torch's tutorial on ensembles: a copy on meta in a list, called with stacked weights."""

    def extra(self) -> None:
        self.b = _Ensemble()


class _InlineEnsemble(_Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        ws = torch.stack([m[0].weight for m in self.models])
        bs = torch.stack([m[0].bias for m in self.models])
        return torch.baddbmm(bs[:, None], x.expand(3, *x.shape), ws.transpose(1, 2)).tanh().mean(0)


class _WeakOther(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        import weakref

        self.lin, self.other = nn.Linear(D, D), weakref.ref(other)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).tanh() + self.other().weight.mean()


@odd(*ABCD)
class WeakOther(Net):
    """A module reaches another's weight through a weak reference."""

    def extra(self) -> None:
        self.c = _WeakOther(self.a[0])


class _WeakSelf(nn.Module):
    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        import weakref

        self.lin, self.root = nn.Linear(D, D), [weakref.proxy(root)]

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).tanh() * self.root[0].factor


@odd(*ABCD)
class WeakRoot(Net):
    """A module asks the root for a number through a weak proxy."""

    def extra(self) -> None:
        self.factor = 0.5
        self.c = _WeakSelf(self)


class _PartialParam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.slope = nn.Parameter(torch.full((D,), 0.2))
        self.act = functools.partial(F.prelu, weight=self.slope)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.lin(x))


@odd(*ABCD)
class PartialParameter(Net):
    """A weight is kept in functools.partial."""

    def extra(self) -> None:
        self.b = _PartialParam()


# 8 --- second wave
import contextvars  # noqa: E402
import ctypes  # noqa: E402
import datetime  # noqa: E402
import multiprocessing as mp  # noqa: E402
import os  # noqa: E402
import secrets  # noqa: E402
import threading  # noqa: E402
import types  # noqa: E402
import uuid  # noqa: E402
import weakref  # noqa: E402
from dataclasses import dataclass  # noqa: E402

import torch.autograd.forward_ad as fwad  # noqa: E402


@odd(*ABCD)
class DualInGlue(Net):
    """A dual tensor goes through blocks, from the glue; its tangent is added."""

    def forward(self, x: Tensor) -> Tensor:
        with fwad.dual_level():
            h = fwad.make_dual(self.a(x), torch.ones(x.shape[0], D, dtype=x.dtype))
            out = self.d(self.c(self.b(h)))
            p, t = fwad.unpack_dual(out)
            return p + 0.1 * t if t is not None else p


@odd(*ABCD)
class DualInput(Net):
    """The same, the input itself is dual."""

    def forward(self, x: Tensor) -> Tensor:
        with fwad.dual_level():
            out = super().forward(fwad.make_dual(x, torch.ones_like(x)))
            p, t = fwad.unpack_dual(out)
            return p + (0.1 * t if t is not None else 0)


@odd(*ABCD)
class JvpGlue(Net):
    """torch.func.jvp over two blocks, in the glue."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out, t = torch.func.jvp(lambda v: self.c(self.b(v)), (h,), (torch.ones_like(h),))
        return self.d(out + 0.1 * t)


LOCAL = threading.local()
VAR: contextvars.ContextVar[Any] = contextvars.ContextVar("VAR", default=1.0)


class _ReadsLocal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * getattr(LOCAL, "scale", 1.0)


class _ReadsVar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * VAR.get()


@odd(*ABCD)
class ThreadLocalNumber(Net):
    """The glue sets a number in a threading.local, which a late module reads."""

    def extra(self) -> None:
        self.c = _ReadsLocal()

    def forward(self, x: Tensor) -> Tensor:
        LOCAL.scale = 0.5
        try:
            return super().forward(x)
        finally:
            del LOCAL.scale


@odd(*ABCD)
class ContextNumber(Net):
    """The glue sets a number in a context variable for the time of the forward, which a late module reads."""

    def extra(self) -> None:
        self.c = _ReadsVar()

    def forward(self, x: Tensor) -> Tensor:
        token = VAR.set(0.5)
        try:
            return super().forward(x)
        finally:
            VAR.reset(token)


class _SetsVar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        VAR.set(h.detach().mean(1, keepdim=True))
        return h


@odd(*ABCD)
class ContextTensor(Net):
    """An early module puts a tensor into a context variable, which a late one reads."""

    def extra(self) -> None:
        self.a, self.c = _SetsVar(), _ReadsVar()


PASS: dict[str, float] = {}


class _ReadsPass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * PASS.get("scale", 1.0)


@odd(*ABCD)
class GlobalForACall(Net):
    """The glue puts a number into a dictionary of the file for the time of the forward, which a late module reads."""

    def extra(self) -> None:
        self.c = _ReadsPass()

    def forward(self, x: Tensor) -> Tensor:
        PASS["scale"] = 0.5
        try:
            return super().forward(x)
        finally:
            PASS.clear()


@odd(*ABCD)
class FlagForACall(Net):
    """The glue sets an attribute of a late module for the time of the forward."""

    def extra(self) -> None:
        self.c = _Flagged()

    def forward(self, x: Tensor) -> Tensor:
        self.c.scale = 0.5
        out = super().forward(x)
        self.c.scale = 1.0
        return out


class _Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = block(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


class _Counter:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class _Slotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.state = block(), _Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.state.calls += 1
        return self.net(x) / self.state.calls


@odd(*ABCD)
class SlottedState(Net):
    """A module counts in an object with slots."""

    def extra(self) -> None:
        self.b = _Slotted()


@odd(*ABCD)
class SlottedShared(Net):
    """Two modules of different stages count in one object with slots."""

    def extra(self) -> None:
        self.b, self.c = _Slotted(), _Slotted()
        self.c.state = self.b.state


class _SharedMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = block(), mp.Value("i", 0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.value += 1
        return self.net(x) / self.calls.value


@odd(*ABCD)
class SharedMemoryCounter(Net):
    """A module counts in a value of multiprocessing, which forks share."""

    def extra(self) -> None:
        self.b = _SharedMemory()


class _Ctype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = block(), ctypes.c_int(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.value += 1
        return self.net(x) / self.calls.value


@odd(*ABCD)
class CtypesCounter(Net):
    """A module counts in a number of ctypes."""

    def extra(self) -> None:
        self.b = _Ctype()


WEAK: Any = weakref.WeakKeyDictionary()


class _WeakKeyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        WEAK[self] = WEAK.get(self, 0) + 1
        return self.net(x) / WEAK[self]


@odd(*ABCD)
class WeakKeyedCounter(Net):
    """Modules count in a WeakKeyDictionary of their file."""

    def extra(self) -> None:
        self.b, self.c = _WeakKeyed(), _WeakKeyed()


class _Names(nn.Module):
    """Counts in a SimpleNamespace within a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.state = block(), (types.SimpleNamespace(calls=0),)

    def forward(self, x: Tensor) -> Tensor:
        self.state[0].calls += 1
        return self.net(x) / self.state[0].calls


@odd(*ABCD)
class NamespaceShared(Net):
    """Two modules of different stages count in one namespace within tuples."""

    def extra(self) -> None:
        self.b, self.c = _Names(), _Names()
        self.c.state = self.b.state


def _entropy(kind: str) -> float:
    if kind == "urandom":
        return os.urandom(1)[0] / 255
    if kind == "uuid":
        return uuid.uuid4().int % 100 / 100
    if kind == "secrets":
        return secrets.randbelow(100) / 100
    if kind == "now":
        return datetime.datetime.now().microsecond / 1e6
    if kind == "system":
        return random.SystemRandom().random()
    if kind == "rng":
        return float(np.random.default_rng().random())
    g = torch.Generator()
    g.seed()
    return float(torch.rand((), generator=g))


def _entropic(kind: str) -> type[nn.Module]:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = block()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * (1 + _entropy(kind))

    class One(Net):
        def extra(self) -> None:
            self.b = Draws()

    One.__doc__ = f"A module scales by {kind}."
    One.__name__ = One.__qualname__ = f"Entropy{kind.title()}"
    globals()[One.__name__] = One
    return odd(*ABCD)(One)


for _kind in ("urandom", "uuid", "secrets", "now", "system", "rng", "generator"):
    _entropic(_kind)


class _Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for n, p in super().named_parameters(*args, **kwargs):
            yield f"x_{n}", p

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@odd(*ABCD)
class RenamedParameters(Net):
    """The root names its parameters otherwise."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for n, p in super().named_parameters(*args, **kwargs):
            yield f"x_{n}", p


@odd(*ABCD)
class RenamedInside(Net):
    """A block names its parameters otherwise."""

    def extra(self) -> None:
        self.b = _Renamed()


@odd(*ABCD)
class UnfrozenByTrain(Net):
    """A block is frozen by the constructor, and freed by train()."""

    def extra(self) -> None:
        self.b.requires_grad_(False)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.b.requires_grad_(mode)
        return self


class _Slots(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.net = block()
        self.factor = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.factor


@odd(*ABCD)
class SlotsModule(Net):
    """A module with __slots__."""

    def extra(self) -> None:
        self.b = _Slots()


class _InitCall(nn.Module):
    calls = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def __init__(self) -> None:
        super().__init__()
        _InitCall.calls += 1
        self.net, self.depth = block(), _InitCall.calls

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.depth


@odd(*ABCD)
class NumberedBlocks(Net):
    """Blocks number themselves by a counter of their class, which the root sets back."""

    def extra(self) -> None:
        _InitCall.calls = 0
        self.b, self.c = _InitCall(), _InitCall()


@odd(*ABCD)
class NumberedForever(Net):
    """Blocks number themselves by a counter of their class, which nobody sets back."""

    def extra(self) -> None:
        self.b, self.c = _InitCall2(), _InitCall2()


class _InitCall2(_InitCall):
    def __init__(self) -> None:
        super().__init__()
        _COUNT[0] += 1
        self.depth = _COUNT[0]


_COUNT = [0]


@odd(*ABCD)
class FunctionPatched(Net):
    """The forward replaces a function of torch for the time of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        plain = torch.nn.functional.linear
        torch.nn.functional.linear = lambda *a: plain(*a) * 0.5
        try:
            return super().forward(x)
        finally:
            torch.nn.functional.linear = plain


class _TwiceHooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()
        self.norms: list[float] = []
        self.net.register_full_backward_hook(lambda m, i, o: self.norms.append(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / (1 + len(self.norms))


@odd(*ABCD)
class BackwardList(Net):
    """A backward hook appends to a list, whose length the forward reads."""

    def extra(self) -> None:
        self.b = _TwiceHooked()
