"""Softmax, norms, losses and dropout on shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from launcher.extras.device_matrix.op_graph import Arg, Ref
from launcher.extras.device_matrix.run.local_operators import (
    Collectives,
    LocalCall,
    Meeting,
    Run,
    bound,
    constant,
    replaced,
    torch_op,
)
from launcher.parallel.trace.tensor_specs import dtype_of

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
    """Returns the dtype of the computation, if the call names one."""
    if call.node.kind.startswith("_"):
        return torch.float32 if call.node.args[2] else None
    argument: Arg = call.node.args[2] if len(call.node.args) > 2 else call.node.kwarg("dtype")
    dtype: torch.dtype | None = constant(argument, torch.device("cpu"))
    return dtype


def cut_softmax(x: Tensor, dim: int, meeting: Meeting, *, log: bool) -> Tensor:
    """Computes in float32 at least, as torch does, and rounds at the end."""
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
    """Prepares logsumexp; the maximum is factored out, unless it is infinite, as in torch."""
    axes = call.axes(call.rule.inside)
    if not axes:
        return run
    meeting = Meeting(here, call.strategy.matrix, axes)
    count = len(call.ins[0])
    argument = call.node.args[1]
    listed = argument if isinstance(argument, tuple) else (argument,)
    dims = tuple(sorted({d % count for d in listed if isinstance(d, int)}))
    keep = len(call.outs[0]) == count

    def over_ranks(x: Tensor) -> Tensor:
        largest = meeting.max(x.detach().amax(dims, keepdim=True))
        largest = largest.masked_fill(largest.abs() == torch.inf, 0)
        total = meeting.sum_for_all((x - largest).exp().sum(dims, keepdim=True))
        out = total.log() + largest
        return out if keep else out.squeeze(dims)

    return over_ranks


NONE, MEAN, SUM = 0, 1, 2


@dataclass(frozen=True)
class ClassLossArguments:
    """The arguments of a loss, on one rank.

    Attributes:
        low: the first of this rank's classes, of ``classes`` in all.
        samples: the number of samples on all ranks.
        targets: the ranks with other targets.
        scores: the ranks with other classes.
    """

    reduction: int
    ignored: int
    smoothing: float
    weighted: bool
    probabilities: bool
    dim: int
    low: int
    classes: int
    samples: int
    targets: Meeting
    scores: Meeting

    @classmethod
    def from_call(cls, call: LocalCall, here: Collectives) -> ClassLossArguments:
        shape = call.ins[0]
        dim = 1 if len(shape) > 1 else 0
        args = (*call.node.args, *(None, None, None, MEAN, -100, 0.0)[len(call.node.args) :])
        matrix = call.strategy.matrix
        samples = tuple(x for x in call.rule.ins[0] if x != "c")
        return cls(
            reduction=_integer(args[3]),
            ignored=_integer(args[4]),
            smoothing=float(args[5]) if isinstance(args[5], int | float) else 0.0,
            weighted=isinstance(args[2], Ref),
            probabilities=call.ins[1] == shape and call.rule.ins[1] == call.rule.ins[0] and len(shape) > 0,
            dim=dim,
            low=call.part("c") * (shape[dim] // call.ways("c")),
            classes=shape[dim],
            samples=prod(shape) // shape[dim],
            targets=Meeting(here, matrix, call.axes(samples)),
            scores=Meeting(here, matrix, call.axes(("c",))),
        )


def _integer(arg: Arg) -> int:
    assert isinstance(arg, int)
    return arg


def class_loss(call: LocalCall, here: Collectives, run: Run, device: torch.device) -> Run:
    """Prepares cross_entropy_loss and nll_loss."""
    loss = ClassLossArguments.from_call(call, here)
    if loss.scores.axes:
        return _of_cut_classes(call, loss)
    if not loss.targets.axes or loss.reduction != MEAN:
        return run

    # torch's own sum, divided by the count over all ranks
    args = (*call.node.args, *(None, None, None)[len(call.node.args) :])
    added = bound(torch_op(call.node.op), replaced(args, 3, SUM), dict(call.node.kwargs), device)

    def over_ranks(scores: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
        out: Tensor = added(scores, target, *weight)
        return (out / _divisor(loss, target, *weight)).to(out.dtype)

    return over_ranks


def _divisor(loss: ClassLossArguments, target: Tensor, *weight: Tensor) -> Tensor | int:
    """Returns the divisor of a mean: the weights of all ranks' targets that are not ignored."""
    if loss.probabilities:
        return loss.samples
    if not weight:
        return loss.targets.sum((target != loss.ignored).sum().float())
    here, local = _here(loss, target, weight[0].shape[0])
    counted = torch.where(here, weight[0][local], 0).sum()
    return loss.scores.sum(loss.targets.sum(counted))


def _here(loss: ClassLossArguments, target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Returns whether each target's class is on this rank and counts, and its place here."""
    local = target - loss.low
    here = (local >= 0) & (local < classes) & (target != loss.ignored)
    return here, local.masked_fill(~here, 0)


def _of_cut_classes(call: LocalCall, loss: ClassLossArguments) -> Run:
    """Returns this rank's term: the losses of targets whose class it has."""
    normalize = call.node.kind == "cross_entropy_loss"

    def over_ranks(scores: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
        logs = cut_softmax(scores, loss.dim, loss.scores, log=True) if normalize else scores
        terms = _soft_terms if loss.probabilities else _hard_terms
        out = terms(loss, logs, target, *weight)
        if loss.reduction == NONE:
            return out
        total = out.sum()
        if loss.reduction == SUM:
            return total
        return (total / _divisor(loss, target, *weight)).to(total.dtype)

    return over_ranks


def _hard_terms(loss: ClassLossArguments, logs: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
    """Returns the losses of targets that are class numbers."""
    known = (target == loss.ignored) | ((target >= 0) & (target < loss.classes))
    torch._assert_async(known.all(), f"a target is beyond the {loss.classes} classes")
    here, local = _here(loss, target, logs.shape[loss.dim])
    target_logs = logs.gather(loss.dim, local.unsqueeze(loss.dim)).squeeze(loss.dim)
    out = torch.where(here, -(target_logs * weight[0][local] if weight else target_logs), 0)
    if not loss.smoothing:
        return out

    spread = -_along_classes(loss, logs, *weight).sum(loss.dim)
    spread = spread.masked_fill(target == loss.ignored, 0)
    return out * (1 - loss.smoothing) + spread * (loss.smoothing / loss.classes)


def _soft_terms(loss: ClassLossArguments, logs: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
    """Returns the losses of targets that are a probability for each class."""
    smooth = target * (1 - loss.smoothing) + loss.smoothing / loss.classes
    return -(_along_classes(loss, logs, *weight) * smooth).sum(loss.dim)


def _along_classes(loss: ClassLossArguments, logs: Tensor, *weight: Tensor) -> Tensor:
    if not weight:
        return logs
    return logs * weight[0].view([-1 if d == loss.dim else 1 for d in range(logs.dim())])


BIAS_FIRST = ("addmm", "baddbmm", "addmv")
TENSORS_WITH_BIAS = {"bilinear": 4}


def bias_once(call: LocalCall, run: Run) -> Run:
    """Lets only ranks with the first of the summed parts add the bias; others add zeros."""
    kind = call.node.kind
    place = 0 if kind in BIAS_FIRST else TENSORS_WITH_BIAS.get(kind, 3) - 1
    if place >= len(call.ins) or call.first(call.rule.sums):
        return run

    def with_zeros(*tensors: Tensor) -> Any:
        zeros = _Zeros.apply(tensors[place])  # type: ignore[no-untyped-call]
        return run(*tensors[:place], zeros, *tensors[place + 1 :])

    return with_zeros


class _Zeros(torch.autograd.Function):
    """Replaces a tensor by zeros; its gradient is zero but exists, as it does on the other ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def mean(call: LocalCall, run: Run) -> Run:
    """Divides by the number of parts: they are equal, so the mean is the sum of their means divided by it."""
    ways = call.ways(*call.rule.sums)
    return run if ways == 1 else lambda *tensors: run(*tensors) / ways


def embedding(call: LocalCall, run: Run, device: torch.device) -> Run:
    """Returns zeros for indices whose row is on another rank."""
    ways = call.ways("v")
    if ways == 1:
        return run
    rows = call.ins[0][0] // ways
    low = call.part("v") * rows
    padding = call.node.args[2] if len(call.node.args) > 2 else -1
    assert isinstance(padding, int)
    here = padding - low if low <= padding < low + rows else -1
    classes = call.ins[0][0]
    beyond = f"an index is beyond the {classes} rows of the embedding"
    look_up = bound(torch_op("embedding"), (Ref(0), Ref(1), here), {}, device)

    def masked(table: Tensor, indices: Tensor) -> Tensor:
        torch._assert_async(((indices >= 0) & (indices < classes)).all(), beyond)
        local = indices - low
        elsewhere = (local < 0) | (local >= rows)
        vectors: Tensor = look_up(table, local.masked_fill(elsewhere, 0))
        return vectors.masked_fill(elsewhere.unsqueeze(-1), 0)

    return masked


@dataclass(frozen=True)
class NormStatistics:
    """Statistics over ``dims``, of ``count`` elements on all ranks; ``centered``: the mean is subtracted."""

    meeting: Meeting
    dims: tuple[int, ...]
    count: int
    eps: float
    centered: bool


class _Normalized(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps)``; also returns mean and variance, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: NormStatistics) -> tuple[Tensor, Tensor, Tensor]:
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
        over: NormStatistics = ctx.over
        along = (grad * out).sum(over.dims, keepdim=True)
        if not over.centered:
            return scale * (grad - out * (over.meeting.sum(along) / over.count)), None
        both = over.meeting.sum(torch.stack([along, grad.sum(over.dims, keepdim=True)])) / over.count
        return scale * (grad - both[1] - out * both[0]), None


def normalized(x: Tensor, over: NormStatistics) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes in float32 at least, as torch does; the caller rounds."""
    wide = x.float() if x.dtype in HALVES else x
    made: tuple[Tensor, Tensor, Tensor] = _Normalized.apply(wide, over)  # type: ignore[no-untyped-call]
    return made


def layer_norm(call: LocalCall, here: Collectives, run: Run) -> Run:
    """Prepares layer_norm and rms_norm over split dims."""
    axes = call.axes(call.rule.inside)
    if not axes:
        return run
    count = len(call.rule.ins[1]) if len(call.ins) > 1 else len(call.node.args[1])  # type: ignore[arg-type]
    centered = call.node.kind == "layer_norm"
    over = NormStatistics(
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
    argument = _argument(call, place)
    if isinstance(argument, int | float):
        return argument
    if call.node.kind != "rms_norm":
        return 1e-5
    dtype = dtype_of(call.dtype)
    return torch.finfo(torch.float32 if dtype in HALVES else dtype).eps  # of torch's own dtype


def batch_norm(call: LocalCall, here: Collectives, run: Run) -> Run:
    """Prepares batch_norm in training over a split batch: running statistics are those of the full batch."""
    axes = call.axes(call.rule.inside)
    if not axes:
        return run
    shape = call.ins[0]
    kept = () if call.node.op.endswith(".no_stats") else (3, 4)  # places of running statistics
    momentum = _argument(call, 4 + len(kept))
    assert isinstance(momentum, float)
    over = NormStatistics(
        meeting=Meeting(here, call.strategy.matrix, axes),
        dims=tuple(d for d in range(len(shape)) if d != 1),
        count=prod(shape) // shape[1],
        eps=_eps(call, 5 + len(kept)),
        centered=True,
    )
    present = [isinstance(_argument(call, place), Ref) for place in (1, 2, *kept)]
    channels = (1, -1, *[1] * (len(shape) - 2))

    def over_ranks(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        rest = iter(others)
        weight, bias, *running = (next(rest) if is_there else None for is_there in present)
        out, mean, variance = normalized(x, over)
        if weight is not None:
            out = out * weight.view(channels)
        if bias is not None:
            out = out + bias.view(channels)
        saved = (out.to(x.dtype), mean.flatten(), (variance + over.eps).rsqrt().flatten())
        batch_statistics = (mean, variance * (over.count / (over.count - 1)))
        moved = (
            _moved(t, new, momentum)
            for t, new in zip(running, batch_statistics, strict=False)
            if t is not None
        )
        return (*saved, *moved)[: len(call.outs)]

    return over_ranks


def _moved(running: Tensor, seen: Tensor, momentum: float) -> Tensor:
    """Returns the running statistics after a batch."""
    return running.lerp(seen.detach().flatten().to(running.dtype), momentum)


def dropout(call: LocalCall, run: Run) -> Run:
    """Uses the generator as ``F.dropout`` of the full tensor does.

    The traced form (``native_dropout``), which also returns the mask, does so too.
    """
    p, training = call.node.args[1:3]
    assert isinstance(p, int | float)
    masked = len(call.outs) > 1
    if not training or not 0 < p < 1 or not (masked or any(call.strategy.takes(call.rule, 0).dims)):
        return run
    part, allocate_full = _part(call), _full_allocator(call)

    def of_full_mask(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if x.device.type != "cpu":  # accelerators have another kernel, with other draws
            keep = torch.native_dropout(allocate_full(x).fill_(1), p, True)[1][part]
            out = x * keep * (1 / (1 - p))
            return (out, keep) if masked else out
        noise = allocate_full(x).bernoulli_(1 - p).div_(1 - p)[part]
        out = x * noise
        return (out, noise != 0) if masked else out

    return of_full_mask


def feature_dropout(call: LocalCall, run: Run) -> Run:
    """Uses the generator as ``F.dropout2d`` of the full tensor does, with one number per channel."""
    p, training = call.node.args[1:3]
    assert isinstance(p, int | float)
    if not training or not 0 < p < 1:
        return run
    places = len(call.ins[0]) - 2
    shape = (*call.ins[0][:2], *[1] * places)
    part = (*_part(call)[:2], *[slice(None)] * places)

    def of_all_channels(x: Tensor) -> Tensor:
        noise = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p).div_(1 - p)
        return x * noise[part]

    return of_all_channels


def drawn(call: LocalCall, run: Run) -> Run:
    """Draws values that depend on their input's shape and strides only."""
    part, allocate_full = _part(call), _full_allocator(call)

    def of_all(x: Tensor) -> Tensor:
        out: Tensor = run(allocate_full(x))
        return out[part]

    return of_all


def _part(call: LocalCall) -> tuple[slice, ...]:
    """Returns this rank's slices of the first tensor."""
    box = call.strategy.takes(call.rule, 0).box(call.ins[0], call.rank)
    return tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))


def _full_allocator(call: LocalCall) -> Callable[[Tensor], Tensor]:
    """Returns a function that allocates the full first tensor; values are drawn in the order of memory."""
    shape = call.ins[0]
    strides = call.strides or torch.empty(shape, device="meta").stride()
    dense = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
    return lambda x: torch.empty_strided(shape, dense, dtype=x.dtype, device=x.device)
