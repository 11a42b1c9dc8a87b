"""Softmax, log-softmax and logsumexp over split dims."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.collectives import Collectives, Meeting
from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.torch_op import Run, constant
from launcher.plan.sharding.op_graph import Arg

HALVES = (torch.float16, torch.bfloat16)


def softmax(call: LocalCall, here: Collectives, run: Run) -> Run:
    axes = call.axes(call.rule.inside)
    if not axes:
        return run
    meeting = Meeting(here, call.strategy.matrix, axes)
    dim = call.node.args[1]
    log = "log_softmax" in call.node.kind
    dtype = _dtype(call)
    assert isinstance(dim, int)

    def over_ranks(x: Tensor) -> Tensor:
        return cut_softmax(x if dtype is None else x.to(dtype), dim, meeting, log=log)

    return over_ranks


def _dtype(call: LocalCall) -> torch.dtype | None:
    """Return the dtype of the computation, if the call names one."""
    if call.node.kind.startswith("_"):
        return torch.float32 if call.node.args[2] else None
    given: Arg = call.node.args[2] if len(call.node.args) > 2 else call.node.kwarg("dtype")
    found: torch.dtype | None = constant(given, torch.device("cpu"))
    return found


def cut_softmax(x: Tensor, dim: int, meeting: Meeting, *, log: bool) -> Tensor:
    """Compute in float32 at least, as torch does, and round at the end."""
    wide = x.float() if x.dtype in HALVES else x
    function = _LogSoftmax if log else _Softmax
    out: Tensor = function.apply(wide, dim, meeting)  # type: ignore[no-untyped-call]
    return out.to(x.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, meeting: Meeting) -> Tensor:
        largest = meeting.max(x.amax(dim, keepdim=True))
        powers = (x - largest).exp_()
        out = powers.div_(meeting.sum(powers.sum(dim, keepdim=True)))
        ctx.save_for_backward(out)
        ctx.dim, ctx.meeting = dim, meeting
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        product = grad * out
        return product - out * ctx.meeting.sum(product.sum(ctx.dim, keepdim=True)), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, meeting: Meeting) -> Tensor:
        below = x - meeting.max(x.amax(dim, keepdim=True))
        out = below - meeting.sum(below.exp().sum(dim, keepdim=True)).log_()
        ctx.save_for_backward(out)
        ctx.dim, ctx.meeting = dim, meeting
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        return grad - out.exp() * ctx.meeting.sum(grad.sum(ctx.dim, keepdim=True)), None, None


def logsumexp(call: LocalCall, here: Collectives, run: Run) -> Run:
    """Prepare logsumexp; the maximum is factored out, unless it is infinite, as in torch."""
    axes = call.axes(call.rule.inside)
    if not axes:
        return run
    meeting = Meeting(here, call.strategy.matrix, axes)
    count = len(call.ins[0])
    given = call.node.args[1]
    listed = given if isinstance(given, tuple) else (given,)
    dims = tuple(sorted({d % count for d in listed if isinstance(d, int)}))
    keep = len(call.outs[0]) == count

    def over_ranks(x: Tensor) -> Tensor:
        largest = meeting.max(x.detach().amax(dims, keepdim=True))
        largest = largest.masked_fill(largest.abs() == torch.inf, 0)
        total = meeting.sum_for_all((x - largest).exp().sum(dims, keepdim=True))
        out = total.log() + largest
        return out if keep else out.squeeze(dims)

    return over_ranks
