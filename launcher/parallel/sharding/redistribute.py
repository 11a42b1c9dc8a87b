"""Carries out planned redistributions on the parts that a rank has, and on their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from launcher.parallel.sharding.process_groups import StageGroups
from launcher.plan.sharding.redistribution.planned import Redistribution
from launcher.plan.sharding.redistribution.step import Step
from launcher.plan.values.layout import Box

Slices = tuple[slice, ...]

# torch 2.13 has new names for both
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def redistribute(
    x: torch.Tensor, forward: Redistribution, backward: Redistribution | None, groups: StageGroups | None
) -> torch.Tensor:
    """Redistribute ``x`` by ``forward`` and its gradient by ``backward``; ``None``: there is no gradient.

    Without ``groups``, or on meta tensors, only shapes are computed.
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
        return out.view_as(x) if out is x else out  # autograd needs a new tensor or a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return carry_out(gradients[0], ctx.back, ctx.groups), None, None, None


def carry_out(x: torch.Tensor, plan: Redistribution, groups: StageGroups | None) -> torch.Tensor:
    """Run the steps of ``plan``, without a gradient.

    Returns a contiguous tensor, which is ``x`` itself if there is nothing to do; ``x`` is never changed.
    """
    for step in plan.steps:
        if step.op == "slice":  # a view on meta too, which keeps the full memory alive
            x = x[_kept(step, groups.rank if groups else 0)]
        elif groups is None or x.is_meta:
            x = x.new_empty(step.after.local_shape(step.shape))
        else:
            x = SENT[step.op](x, step, groups)
    return x.contiguous()


@lru_cache(maxsize=1 << 12)
def _kept(step: Step, rank: int) -> Slices:
    had, kept = (layout.box(step.shape, rank) for layout in (step.before, step.after))
    return _within(kept, had)


def _all_reduce(x: torch.Tensor, step: Step, groups: StageGroups) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)  # others may use the old values
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
    got = sent.new_empty(sent.shape)
    dist.all_to_all_single(_flat(got), _flat(sent), group=group)
    return _joined(got, step.dim, _order(step, step.axes, row))


def _exchange(x: torch.Tensor, step: Step, groups: StageGroups) -> torch.Tensor:
    """Copy what the rank has, and exchange the rest in one flat tensor each way, ordered by rank."""
    group, row = groups.of(step.rows)
    packing = _packing(step, row.index(groups.rank))
    out = x.new_empty(step.after.local_shape(step.shape))
    for target, source in packing.own:
        out[target] = x[source]
    parts = [x[source].reshape(-1) for source in packing.sent]
    sent = torch.cat(parts) if parts else x.new_empty(0)
    got = x.new_empty(sum(packing.received_sizes))
    width = x.element_size() if _moves_as_bytes(x) else 1
    sizes_in, sizes_out = ([n * width for n in side] for side in (packing.received_sizes, packing.sent_sizes))
    dist.all_to_all_single(_flat(got), _flat(sent), sizes_in, sizes_out, group=group)
    parts = got.split([n for n in packing.received_sizes if n])
    for target, part in zip(packing.received, parts, strict=True):
        out[target] = part.view(out[target].shape)
    return out


@dataclass(frozen=True)
class _Packing:
    """One rank's slices in an exchange.

    ``own`` pairs the targets and sources of what it keeps; ``sent`` and ``received`` are ordered by rank.
    Sizes are elements for each rank of the group, and 0 for itself.
    """

    own: tuple[tuple[Slices, Slices], ...]
    sent: tuple[Slices, ...]
    sent_sizes: tuple[int, ...]
    received: tuple[Slices, ...]
    received_sizes: tuple[int, ...]


@lru_cache(maxsize=1 << 12)
def _packing(step: Step, place: int) -> _Packing:
    plan = step.exchange
    had, wanted = plan.src.box(plan.shape, place), plan.dst.box(plan.shape, place)
    sends, receives = plan.of(place)
    own = [p.box for p in receives if p.sender == place]
    sent = {p.receiver: p for p in sends if p.receiver != place}
    received = {p.sender: p for p in receives if p.sender != place}
    sizes = [
        tuple(pieces[r].elements if r in pieces else 0 for r in range(plan.src.ranks))
        for pieces in (sent, received)
    ]
    return _Packing(
        own=tuple((_within(box, wanted), _within(box, had)) for box in own),
        sent=tuple(_within(sent[r].box, had) for r in sorted(sent)),
        sent_sizes=sizes[0],
        received=tuple(_within(received[r].box, wanted) for r in sorted(received)),
        received_sizes=sizes[1],
    )


SENT = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "exchange": _exchange,
}  # fmt: skip


@lru_cache(maxsize=1 << 12)
def _order(step: Step, axes: tuple[int, ...], row: tuple[int, ...]) -> tuple[int, ...]:
    """Return which of the parts that ``axes`` make each rank of a group has."""
    return tuple(step.before.part(axes, rank) for rank in row)


def _split(x: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
    """Return the parts of ``x`` for each rank of a group, one after the other, as they are sent."""
    if dim == 0 and parts == tuple(range(len(parts))):
        return x.contiguous().view(len(parts), x.shape[0] // len(parts), *x.shape[1:])
    pieces = x.chunk(len(parts), dim)
    return torch.stack([pieces[part] for part in parts]).contiguous()  # stack keeps channels last


def _joined(got: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
    """Join the parts that came from each rank of a group to one tensor."""
    if dim == 0 and parts == tuple(range(len(parts))):
        return got.view(-1, *got.shape[2:])
    return torch.cat([got[parts.index(part)] for part in range(len(parts))], dim)


def _within(box: Box, base: Box) -> Slices:
    """Return the slices of ``box`` in a tensor that has ``base``."""
    box = box.within(base)
    return tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))


def _moves_as_bytes(x: torch.Tensor) -> bool:
    """Whether backends may not support the dtype: bytes are sent then, as nothing is computed."""
    return x.dtype not in (torch.float32, torch.float64)


def _flat(x: torch.Tensor) -> torch.Tensor:
    flat = x.contiguous().view(-1)
    return flat.view(torch.uint8) if _moves_as_bytes(x) else flat
