"""Carries out planned redistributions on the parts that a rank has, and on their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from launcher.parallel.sharding.process_groups import StageGroups
from launcher.plan.sharding.direct_exchange import Piece
from launcher.plan.sharding.redistribution import Redistribution
from launcher.plan.sharding.redistribution_step import Step
from launcher.plan.values.layout import Box

# torch 2.13 has new names for both
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def redistribute(
    x: torch.Tensor, forward: Redistribution, backward: Redistribution | None, groups: StageGroups | None
) -> torch.Tensor:
    """``x`` as ``forward`` says; its gradient as ``backward`` says, none where there is none to come.

    Without ``groups``, or on meta tensors, only shapes are worked out.
    """
    if not forward.steps and (backward is None or not backward.steps):
        return x.contiguous()
    if backward is None:
        return carry_out(x.detach(), forward, groups)
    out: torch.Tensor = _Redistribute.apply(x, forward, backward, groups)  # type: ignore[no-untyped-call]
    return out


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, there: Redistribution, back: Redistribution, groups: StageGroups | None
    ) -> torch.Tensor:
        ctx.back, ctx.groups = back, groups
        out = carry_out(x, there, groups)
        return out.view_as(x) if out is x else out  # what goes in may not come out, but a view of it

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return carry_out(gradients[0], ctx.back, ctx.groups), None, None, None


def carry_out(x: torch.Tensor, plan: Redistribution, groups: StageGroups | None) -> torch.Tensor:
    """Not differentiable. Contiguous; ``x`` itself where nothing is to be done, and never changed."""
    for step in plan.steps:
        if groups is None or x.is_meta:
            x = x.new_empty(step.after.local_shape(step.shape))
        else:
            x = STEPS[step.op](x, step, groups)
    return x.contiguous()


def _slice(x: torch.Tensor, step: Step, groups: StageGroups) -> torch.Tensor:
    had, kept = (layout.box(step.shape, groups.rank) for layout in (step.before, step.after))
    return _cut(x, kept.within(had))


def _all_reduce(x: torch.Tensor, step: Step, groups: StageGroups) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)  # others may use what it was
    dist.all_reduce(out, group=groups.of(step.rows)[0])
    return out


def _all_gather(x: torch.Tensor, step: Step, groups: StageGroups) -> torch.Tensor:
    group, row = groups.of(step.rows)
    got = x.new_empty((len(row), *x.shape))
    _gather(_flat(got), _flat(x), group=group)
    return _joined(got, step.dim, _order(step, step.axes, row))


def _reduce_scatter(x: torch.Tensor, step: Step, groups: StageGroups) -> torch.Tensor:
    group, row = groups.of(step.rows)
    sent = _split(x, step.dim, _order(step, step.axes, row))
    got = sent.new_empty(sent.shape[1:])
    _scatter(got.view(-1), sent.view(-1), group=group)
    return got


def _all_to_all(x: torch.Tensor, step: Step, groups: StageGroups) -> torch.Tensor:
    group, row = groups.of(step.rows)
    sent = _split(x, step.to_dim, _order(step, step.to_axes, row))
    got = torch.empty_like(sent)
    dist.all_to_all_single(_flat(got), _flat(sent), group=group)
    return _joined(got, step.dim, _order(step, step.axes, row))


def _exchange(x: torch.Tensor, step: Step, groups: StageGroups) -> torch.Tensor:
    group, row = groups.of(step.rows)
    me = row.index(groups.rank)
    plan = step.exchange
    sends, receives = plan.of(me)
    had, wanted = plan.src.box(plan.shape, me), plan.dst.box(plan.shape, me)
    out = x.new_empty(wanted.shape)

    # what it has is copied, the rest goes through one flat tensor each way, in the order of ranks
    for piece in receives:
        if piece.sender == me:
            _cut(out, piece.box.within(wanted)).copy_(_cut(x, piece.box.within(had)))
    sends = tuple(p for p in sends if p.receiver != me)
    receives = tuple(p for p in receives if p.sender != me)
    parts = [_cut(x, p.box.within(had)).reshape(-1) for p in sends]
    sent = torch.cat(parts) if parts else x.new_empty(0)
    got = x.new_empty(sum(p.elements for p in receives))
    width = x.element_size() if _moves_as_bytes(x) else 1
    dist.all_to_all_single(
        _flat(got), _flat(sent),
        [n * width for n in _sizes(receives, [p.sender for p in receives], len(row))],
        [n * width for n in _sizes(sends, [p.receiver for p in sends], len(row))],
        group=group,
    )  # fmt: skip
    for piece, part in zip(receives, got.split([p.elements for p in receives]), strict=True):
        _cut(out, piece.box.within(wanted)).copy_(part.view(piece.box.shape))
    return out


STEPS = {
    "slice": _slice, "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "exchange": _exchange,
}  # fmt: skip


def _order(step: Step, axes: tuple[int, ...], row: tuple[int, ...]) -> list[int]:
    """Which of the parts that ``axes`` cut is that of each rank of a group."""
    return [step.before.part(axes, rank) for rank in row]


def _split(x: torch.Tensor, dim: int, parts: list[int]) -> torch.Tensor:
    """For each rank of a group the part of ``x`` that it gets, one after the other."""
    if dim == 0 and parts == sorted(parts):
        return x.contiguous().view(len(parts), x.shape[0] // len(parts), *x.shape[1:])
    pieces = x.chunk(len(parts), dim)
    return torch.stack([pieces[part] for part in parts])


def _joined(got: torch.Tensor, dim: int, parts: list[int]) -> torch.Tensor:
    """What came from each rank of a group, as one tensor."""
    if dim == 0 and parts == sorted(parts):
        return got.view(-1, *got.shape[2:])
    return torch.cat([got[parts.index(part)] for part in range(len(parts))], dim)


def _cut(x: torch.Tensor, box: Box) -> torch.Tensor:
    return x[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))]


def _sizes(pieces: Sequence[Piece], ranks: list[int], size: int) -> list[int]:
    sizes = [0] * size
    for piece, rank in zip(pieces, ranks, strict=True):
        sizes[rank] = prod(piece.box.shape)
    return sizes


def _moves_as_bytes(x: torch.Tensor) -> bool:
    """Whether backends may not know its dtype: nothing is computed, so they need not."""
    return x.dtype not in (torch.float32, torch.float64)


def _flat(x: torch.Tensor) -> torch.Tensor:
    flat = x.contiguous().view(-1)
    return flat.view(torch.uint8) if _moves_as_bytes(x) else flat
