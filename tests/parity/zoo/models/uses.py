"""Weights that are used in unusual places: by a penalty, a view, a copy, a Function, or glue on several stages."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from tests.parity.zoo.case import ABCD, D, Net, block, odd


@odd(*ABCD)
class PenaltyOfAll(Net):
    """A penalty, the sum of the squares of all weights of the model, scales the logits at the end."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum((p.square().sum() for p in self.parameters()), x.new_zeros(()))
        return self.d(self.c(self.b(self.a(x)))) * (1 - 1e-2 * penalty)


@odd(*ABCD)
class VectorOfWeights(Net):
    """The logits are divided by the norm of all weights of the model as one vector."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)))) / parameters_to_vector(self.parameters()).norm()


@odd(*ABCD)
class WeightDetachedLate(Net):
    """An early weight is used again at the end, detached."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.a(x)))
        return self.d(F.linear(h, self.a[0].weight.detach()))


@odd(*ABCD)
class WeightLateWithoutGrad(Net):
    """A late weight is used early, and an early one late, under no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            ahead = F.linear(x, self.d.weight)
        h = self.c(self.b(self.a(x) + ahead))
        with torch.no_grad():
            again = F.linear(h, self.a[0].weight)
        return self.d(h + again)


@odd(*ABCD)
class ScalesByLayer(Net):
    """A parameter of the root has a row for each block, which scales the output of the block."""

    def extra(self) -> None:
        self.scales = nn.Parameter(torch.ones(4, D))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i, name in enumerate(ABCD):
            h = getattr(self, name)(h) * self.scales[i]
        return h


@odd(*ABCD)
class ScalesUnbound(ScalesByLayer):
    """A root parameter with a row for each block, split into its rows at the start."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for name, row in zip(ABCD, self.scales.unbind(), strict=True):
            h = getattr(self, name)(h) * row
        return h


@odd(*ABCD)
class OneGate(Net):
    """One scalar of the root is used after every block."""

    def extra(self) -> None:
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for name in ABCD:
            h = h * self.gate + getattr(self, name)(h)
        return h


@odd(*ABCD)
class NormalizedInGlue(Net):
    """The glue uses a block's weight, divided by its norm, beside the block."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        w = self.c[0].weight
        return self.d(self.c(h) + F.linear(h, w / w.norm()))


@odd(*ABCD)
class IntegerParameter(Net):
    """An integer parameter without a gradient."""

    def extra(self) -> None:
        self.order = nn.Parameter(torch.randperm(D), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))[:, self.order]))


@odd(*ABCD)
class CopiedInForward(Net):
    """A block is copied in the forward, and the copy is called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(copy.deepcopy(self.b)(self.b(self.a(x)))))


class _Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


@odd(*ABCD)
class DirtyFunction(Net):
    """A user's Function that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)) * 1.0
        _Dirty.apply(h)
        return self.d(self.c(h))


class _Top(Function):
    @staticmethod
    def forward(x: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
        values, places = x.topk(k)
        return values, places, k

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, places = ctx.saved_tensors
        return torch.zeros_like(x).scatter(1, places, grads[0]), None


@odd(*ABCD)
class TopFunction(Net):
    """A Function with setup_context that returns a tensor, integers without gradient, and a number."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        values, places, k = _Top.apply(h, 4)
        return self.d(self.c(h).scatter(1, places, values / k))


class _OfWeights(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


@odd(*ABCD)
class FunctionOfWeight(Net):
    """A Function computes a matrix product with the weight of a later block."""

    def forward(self, x: Tensor) -> Tensor:
        h = _OfWeights.apply(self.a(x), self.c[0].weight)
        return self.d(self.c(self.b(h)))


class _UsesOtherWeight(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.net, self.other = block(), other

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + F.linear(x, self.other[0].weight)


@odd(*ABCD)
class WeightOfAnother(Net):
    """A late module contains an early one and uses its weight."""

    def extra(self) -> None:
        self.c = _UsesOtherWeight(self.a)
