"""Norms whose statistics span several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.collectives import Collectives, Meeting
from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.softmax import HALVES
from launcher.parallel.sharding.kernels.torch_op import Run, torch_dtype
from launcher.plan.sharding.op_graph import Arg, Ref


@dataclass(frozen=True)
class Statistics:
    """Statistics over ``dims``, of ``count`` elements on all ranks; ``centered``: the mean is subtracted."""

    meeting: Meeting
    dims: tuple[int, ...]
    count: int
    eps: float
    centered: bool


class _Normalized(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps)``; also returns mean and variance, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Statistics) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.new_zeros(())
        if over.centered:
            mean = over.meeting.sum(x.sum(over.dims, keepdim=True)) / over.count
        off = x - mean
        variance = over.meeting.sum(off.square().sum(over.dims, keepdim=True)) / over.count
        scale = (variance + over.eps).rsqrt()
        out = off * scale

        ctx.save_for_backward(out, scale)
        ctx.over = over
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        out, scale = ctx.saved_tensors
        over: Statistics = ctx.over
        along = (grad * out).sum(over.dims, keepdim=True)
        if not over.centered:
            return scale * (grad - out * (over.meeting.sum(along) / over.count)), None
        both = over.meeting.sum(torch.stack([along, grad.sum(over.dims, keepdim=True)])) / over.count
        return scale * (grad - both[1] - out * both[0]), None


def normalized(x: Tensor, over: Statistics) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise in float32 at least, as torch does; the caller rounds."""
    wide = x.float() if x.dtype in HALVES else x
    made: tuple[Tensor, Tensor, Tensor] = _Normalized.apply(wide, over)  # type: ignore[no-untyped-call]
    return made


def layer_norm(call: LocalCall, here: Collectives, run: Run) -> Run:
    """Prepare layer_norm and rms_norm over split dims."""
    axes = call.axes(call.rule.inside)
    if not axes:
        return run
    count = len(call.rule.ins[1]) if len(call.ins) > 1 else len(call.node.args[1])  # type: ignore[arg-type]
    centered = call.node.kind == "layer_norm"
    over = Statistics(
        meeting=Meeting(here, call.strategy.matrix, axes),
        dims=tuple(range(-count, 0)),
        count=prod(call.ins[0][-count:]),
        eps=_eps(call, 4 if centered else 3),
        centered=centered,
    )
    weighted = isinstance(_argument(call, 2), Ref)

    def over_ranks(x: Tensor, *affine: Tensor) -> Tensor:
        out, _, _ = normalized(x, over)
        if weighted:
            out = out * affine[0]
        if len(affine) > weighted:
            out = out + affine[-1]
        return out.to(x.dtype)

    return over_ranks


def _argument(call: LocalCall, place: int) -> Arg:
    return call.node.args[place] if len(call.node.args) > place else None


def _eps(call: LocalCall, place: int) -> float:
    given = _argument(call, place)
    if isinstance(given, int | float):
        return given
    if call.node.kind != "rms_norm":
        return 1e-5
    dtype = torch_dtype(call.dtype)
    return torch.finfo(torch.float32 if dtype in HALVES else dtype).eps  # of torch's own dtype


def batch_norm(call: LocalCall, here: Collectives, run: Run) -> Run:
    """Prepare batch_norm in training over a split batch: running statistics are those of the full batch."""
    axes = call.axes(call.rule.inside)
    if not axes:
        return run
    shape = call.ins[0]
    kept = () if call.node.op.endswith(".no_stats") else (3, 4)  # places of running statistics
    momentum = _argument(call, 4 + len(kept))
    assert isinstance(momentum, float)
    over = Statistics(
        meeting=Meeting(here, call.strategy.matrix, axes),
        dims=tuple(d for d in range(len(shape)) if d != 1),
        count=prod(shape) // shape[1],
        eps=_eps(call, 5 + len(kept)),
        centered=True,
    )
    there = [isinstance(_argument(call, place), Ref) for place in (1, 2, *kept)]
    channels = (1, -1, *[1] * (len(shape) - 2))

    def over_ranks(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        rest = iter(others)
        weight, bias, *running = (next(rest) if is_there else None for is_there in there)
        out, mean, variance = normalized(x, over)
        if weight is not None:
            out = out * weight.view(channels)
        if bias is not None:
            out = out + bias.view(channels)
        saved = (out.to(x.dtype), mean.flatten(), (variance + over.eps).rsqrt().flatten())
        seen = (mean, variance * (over.count / (over.count - 1)))
        moved = (_moved(t, new, momentum) for t, new in zip(running, seen, strict=False) if t is not None)
        return (*saved, *moved)[: len(call.outs)]

    return over_ranks


def _moved(running: Tensor, seen: Tensor, momentum: float) -> Tensor:
    """Return the running statistics after a batch."""
    return running.lerp(seen.detach().flatten().to(running.dtype), momentum)
