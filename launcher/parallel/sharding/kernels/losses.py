"""Losses of classes over a split batch and over split classes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.arguments import replaced
from launcher.parallel.sharding.kernels.collectives import Collectives, Meeting
from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.softmax import cut_softmax
from launcher.parallel.sharding.kernels.torch_op import Run, bound, torch_op
from launcher.plan.sharding.op_graph import Arg, Ref

NONE, MEAN, SUM = 0, 1, 2


@dataclass(frozen=True)
class ClassLoss:
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
    def of(cls, call: LocalCall, here: Collectives) -> ClassLoss:
        shape = call.ins[0]
        dim = 1 if len(shape) > 1 else 0
        args = (*call.node.args, *(None, None, None, MEAN, -100, 0.0)[len(call.node.args) :])
        matrix = call.strategy.matrix
        samples = tuple(x for x in call.rule.ins[0] if x != "c")
        return cls(
            reduction=_whole_number(args[3]),
            ignored=_whole_number(args[4]),
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


def _whole_number(arg: Arg) -> int:
    assert isinstance(arg, int)
    return arg


def class_loss(call: LocalCall, here: Collectives, run: Run, device: torch.device) -> Run:
    """Prepare cross_entropy_loss and nll_loss."""
    loss = ClassLoss.of(call, here)
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


def _divisor(loss: ClassLoss, target: Tensor, *weight: Tensor) -> Tensor | int:
    """Return the divisor of a mean: the weights of all ranks' targets that are not ignored."""
    if loss.probabilities:
        return loss.samples
    if not weight:
        return loss.targets.sum((target != loss.ignored).sum().float())
    here, local = _here(loss, target, weight[0].shape[0])
    counted = torch.where(here, weight[0][local], 0).sum()
    return loss.scores.sum(loss.targets.sum(counted))


def _here(loss: ClassLoss, target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return whether each target's class is on this rank and counts, and its place here."""
    local = target - loss.low
    here = (local >= 0) & (local < classes) & (target != loss.ignored)
    return here, local.masked_fill(~here, 0)


def _of_cut_classes(call: LocalCall, loss: ClassLoss) -> Run:
    """Return this rank's term: the losses of targets whose class it has."""
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


def _hard_terms(loss: ClassLoss, logs: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
    """Return the losses of targets that are class numbers."""
    known = (target == loss.ignored) | ((target >= 0) & (target < loss.classes))
    torch._assert_async(known.all(), f"a target is beyond the {loss.classes} classes")
    here, local = _here(loss, target, logs.shape[loss.dim])
    found = logs.gather(loss.dim, local.unsqueeze(loss.dim)).squeeze(loss.dim)
    out = torch.where(here, -(found * weight[0][local] if weight else found), 0)
    if not loss.smoothing:
        return out

    spread = -_along_classes(loss, logs, *weight).sum(loss.dim)
    spread = spread.masked_fill(target == loss.ignored, 0)
    return out * (1 - loss.smoothing) + spread * (loss.smoothing / loss.classes)


def _soft_terms(loss: ClassLoss, logs: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
    """Return the losses of targets that are a probability for each class."""
    smooth = target * (1 - loss.smoothing) + loss.smoothing / loss.classes
    return -(_along_classes(loss, logs, *weight) * smooth).sum(loss.dim)


def _along_classes(loss: ClassLoss, logs: Tensor, *weight: Tensor) -> Tensor:
    if not weight:
        return logs
    return logs * weight[0].view([-1 if d == loss.dim else 1 for d in range(logs.dim())])
