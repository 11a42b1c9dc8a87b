"""A user's own autograd functions, in the glue and in modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from tests.parity.zoo.case import ABCD, D, Net, block, odd


class _Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.by * grad, None


class _Round(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class _Mix(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x - y

    @staticmethod
    def backward(ctx: Any, p: Tensor, q: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return 3 * p * y + q, 5 * p * x - q


@odd(*ABCD)
class GradientReversal(Net):
    """A gradient is reversed in the glue."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(self.c(_Reverse.apply(h, 0.3)) + h)


@odd(*ABCD)
class StraightThrough(Net):
    """Rounding with the gradient of the identity, in the glue."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(_Round.apply(self.c(_Round.apply(self.b(self.a(x))))))


@odd(*ABCD)
class TwoInTwoOut(Net):
    """A function of two tensors from two stages, with wrong gradients on purpose."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        p, q = _Mix.apply(h, self.c(self.b(h)))
        return self.d(p) + q


class _Quantized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, _Round.apply(self.weight), self.bias)


@odd("a", "q", "c", "d")
class QuantizedWeights(Net):
    """A layer that rounds its weights inside, with a straight-through gradient."""

    def extra(self) -> None:
        self.q = _Quantized(D, D)
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.q(self.a(x))))


@odd(*ABCD)
class DetachTrick(Net):
    """A straight-through gradient by ``x + (y - x).detach()`` in the glue."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        h = h + (h.sign() - h).detach()
        return self.d(self.c(h))


@odd(*ABCD)
class GumbelHard(Net):
    """A hard choice with the gradient of a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        soft = self.b(self.a(x)).mul(3).softmax(-1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        return self.d(self.c(hard - soft.detach() + soft))


@odd(*ABCD)
class GradInForward(Net):
    """torch.autograd.grad within the forward: the gradient is added to a block's output."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
        return self.d(self.c(y + g))


class _Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.net(at).sum(), at, create_graph=True)
        return force


@odd("a", "b", "energy", "d")
class Force(Net):
    """A module that returns the gradient of an energy, as interatomic potentials do."""

    def extra(self) -> None:
        self.energy = _Energy()
        del self.c

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.d(h + self.energy(h))


class _PerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(lambda row: torch.tanh(self.weight @ row))(x)
        return out


@odd("a", "each", "c", "d")
class VmapInside(Net):
    """vmap within a module."""

    def extra(self) -> None:
        self.each = _PerSample()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.each(self.a(x))))


@odd(*ABCD)
class VmapGlue(Net):
    """vmap over a module, in the glue."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.func.vmap(self.b)(self.a(x))
        return self.d(self.c(h))


class _Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D) / 3)

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.weight * row).sum()))(x)
        return slope


class _Jacobian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        slopes: Tensor = torch.func.vmap(torch.func.jacrev(self.net))(x)
        return x + slopes.sum(1)


@odd("a", "jacobian", "c", "d")
class FuncJacobian(Net):
    """torch.func.jacrev of a submodule under vmap."""

    def extra(self) -> None:
        self.jacobian = _Jacobian()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.jacobian(self.a(x))))


class _Pullback(_Jacobian):
    def forward(self, x: Tensor) -> Tensor:
        y, back = torch.func.vjp(self.net, x)
        return y + back(torch.ones_like(y))[0]


@odd("a", "pullback", "c", "d")
class FuncVjp(Net):
    """torch.func.vjp of a submodule by its input."""

    def extra(self) -> None:
        self.pullback = _Pullback()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.pullback(self.a(x))))


@odd("a", "slope", "c", "d")
class FuncGrad(Net):
    """torch.func.grad under vmap within a module."""

    def extra(self) -> None:
        self.slope = _Slope()
        del self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.slope(self.a(x))))
