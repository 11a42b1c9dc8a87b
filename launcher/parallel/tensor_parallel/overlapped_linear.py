"""A linear layer that sends the gradient of its input while the gradient of its weight is computed.

Of the nodes that are ready, a backward runs the one that was made last. They are made in this order:
``_Arrive``, ``_Weight``, ``_Send``, ``_Linear``. ``_Linear`` computes the gradient of the input, ``_Send``
starts the collective, ``_Weight`` computes meanwhile, and ``_Arrive``, which needs both, waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

from launcher.parallel.split_backward import PLAIN, transformed
from launcher.parallel.tensor_parallel.collectives import Sending, SendingInput


class OverlappedLinear:
    """One call of a linear layer; ``weights`` returns its weight and its bias, once its input has arrived.

    Calls whose gradients might differ from autograd's in any bit are left to autograd, without overlap.
    """

    def __init__(self, weights: Callable[[], tuple[Tensor, Tensor | None]]) -> None:
        self.weights = weights
        self.used: tuple[Tensor, Tensor | None, Tensor] | None = None

    def enter(self, x: Tensor, entry: SendingInput) -> Tensor:
        """Converts ``x`` to the layer's input, and returns it."""
        call = _Call(entry)
        x = _Arrive.apply(x, call)  # type: ignore[no-untyped-call]
        weight, bias = self.weights()
        if not _fits(x, weight, bias):
            return x

        # no values: only a gradient passes here
        done = _Weight.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        self.used = weight, bias, done
        return _Send.apply(x, call)  # type: ignore[no-any-return, no-untyped-call]

    def product(self, x: Tensor) -> Tensor | None:
        """Returns the product with the entered ``x``, or ``None``.

        It is ``None`` if ``x`` entered for another layer, or autograd computes the product.
        """
        if self.used is None:
            return None
        weight, bias, done = self.used
        out: Tensor = _Linear.apply(x, weight, bias, done)  # type: ignore[no-untyped-call]
        return out


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns true if plain autograd sends one gradient and can compute another one meanwhile."""
    operands = [x, weight] if bias is None else [x, weight, bias]
    plain = all(type(t) in PLAIN and t.layout == torch.strided and t.dtype == x.dtype for t in operands)
    learns = weight.requires_grad or (bias is not None and bias.requires_grad)
    return plain and learns and x.requires_grad and x.dim() > 1 and not transformed()


@dataclass
class _Call:
    """The state of a call; ``sending`` is set between the two halves of a backward."""

    entry: SendingInput
    sending: Sending | None = None


class _Arrive(Function):
    """Passes a tensor in; its gradient has been sent by ``_Send``, or is sent now."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return call.entry.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        call = ctx.call
        sending, call.sending = call.sending, None
        return (call.entry.start(grad, later=False) if sending is None else sending).wait(), None


class _Send(Function):
    """Sends the gradient of the input and continues; a second derivative is sent as any other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            return grad, None
        ctx.call.sending = ctx.call.entry.start(grad, later=True)
        return grad.new_zeros(()).expand(grad.shape), None


class _Weight(Function):
    """Computes the gradients of a layer's weight and bias, from the gradient of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.turned = _by_columns(weight.t())
        ctx.bias = None if bias is None else bias.shape
        return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 3
        (x,) = ctx.saved_tensors
        to_weight = to_bias = None
        rows = _as_matrix(grad)
        if ctx.needs_input_grad[1]:
            to_weight = rows.t() @ _as_matrix(x) if ctx.turned else (_as_matrix(x).t() @ rows).t()
        if ctx.needs_input_grad[2]:
            to_bias = (rows if _in_one(x) else grad).sum_to_size(ctx.bias)
        return None, to_weight, to_bias


class _Linear(Function):
    """The layer; its backward computes the gradient of the input, and ``_Weight`` the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, done: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight)
        ctx.shape = x.shape
        ctx.turned = _by_columns(_as_matrix(x))
        if x.dim() == 2 or x.is_contiguous():
            out = F.linear(x, weight, bias)
        else:  # torch flattens the input if the weight is trained
            out = F.linear(_as_matrix(x), weight).view(done.shape)
            out = out if bias is None else out + bias

        # a view that a Function returns could not be changed in place
        result: Tensor = torch.ops.aten._unsafe_view(out, out.shape)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 4
        (weight,) = ctx.saved_tensors
        rows = _as_matrix(grad)
        to_x = (weight.t() @ rows.t()).t() if ctx.turned else rows @ weight
        return to_x.reshape(ctx.shape), None, None, grad


def _as_matrix(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


def _by_columns(t: Tensor) -> bool:
    """Returns true if a matrix is stored column by column; torch stores its gradient likewise."""
    return t.stride() == (1, t.shape[0])


def _in_one(x: Tensor) -> bool:
    """Returns true if torch adds the bias in the product (``addmm``), not afterwards."""
    return x.dim() == 2 or (x.dim() == 3 and x.is_contiguous())
