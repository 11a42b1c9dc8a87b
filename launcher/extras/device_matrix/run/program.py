"""Runs a sharded graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.extras.device_matrix.all_to_all_v import Rows, rows_over
from launcher.extras.device_matrix.redistribution import Redistribution, Step
from launcher.extras.device_matrix.rules.table import uncut_rule
from launcher.extras.device_matrix.run.kernels import Kernel, prepare
from launcher.extras.device_matrix.run.local_operators import LocalCall
from launcher.extras.device_matrix.sharded_graph import RedistributionPair, ShardedGraph, move_to_rest, taken
from launcher.plan.values.layout import Box

REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class StageGroups:
    """A rank's process groups in its stage.

    ``rank`` is its place in the stage. ``groups`` has, for rows of ranks, the group of this rank's row, and
    the row.
    """

    rank: int
    groups: dict[Rows, tuple[dist.ProcessGroup, tuple[int, ...]]]

    @classmethod
    def build(
        cls,
        stages: Sequence[tuple[int, ...]],
        needs: Sequence[Iterable[Rows]],
        stage_group: dist.ProcessGroup | None = None,
    ) -> StageGroups:
        """Makes all groups.

        Every rank calls this with the same arguments, as all ranks make each group in one order.

        Args:
            stages: the ranks of each stage, ascending and disjoint.
            needs: the rows of ranks for which each stage needs groups.
            stage_group: the group of this rank's stage, if it exists: on every rank or on none.
        """
        rank = dist.get_rank()
        own = next(stage for stage in stages if rank in stage)
        place = own.index(rank)
        groups: dict[Rows, tuple[dist.ProcessGroup, tuple[int, ...]]] = {}
        for stage, need in zip(stages, needs, strict=True):
            need = [rows for rows in dict.fromkeys(need) if len(rows[0]) > 1]
            made = {
                row: _group(stage, row, stage_group)
                for row in dict.fromkeys(row for rows in need for row in rows)
            }
            if stage == own:
                mine = {rows: next(row for row in rows if place in row) for rows in need}
                groups = {rows: (made[row], row) for rows, row in mine.items()}
        return cls(place, groups)

    def of(self, rows: Rows) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
        """Returns the group of this rank's row, and the row in the order of the group."""
        return self.groups[rows]

    def all_reduce(
        self,
        x: torch.Tensor,
        matrix: tuple[int, ...],
        axes: tuple[int, ...],
        op: Literal["sum", "max"] = "sum",
    ) -> torch.Tensor:
        """Reduces ``x`` (contiguous) in place over axes of a device matrix; meta tensors are not sent."""
        if not x.is_meta and prod(matrix[a] for a in axes) > 1:
            dist.all_reduce(x, REDUCE[op], group=self.of(rows_over(matrix, axes))[0])
        return x


def _group(
    stage: tuple[int, ...], row: tuple[int, ...], stage_group: dist.ProcessGroup | None
) -> dist.ProcessGroup:  # fmt: skip
    if len(row) == dist.get_world_size():
        stage_group = dist.group.WORLD
    if len(row) == len(stage) and stage_group is not None:
        return stage_group
    group: dist.ProcessGroup = dist.new_group([stage[r] for r in row])  # making one costs 10 ms
    return group


Slices = tuple[slice, ...]

# torch 2.13 has new names for both
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def redistribute(
    x: torch.Tensor, forward: Redistribution, backward: Redistribution | None, groups: StageGroups | None
) -> torch.Tensor:
    """Redistributes ``x`` by ``forward`` and its gradient by ``backward``; ``None``: there is no gradient.

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
    """Runs the steps of ``plan``, without a gradient.

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
    before, after = (layout.box(step.shape, rank) for layout in (step.before, step.after))
    return _within(after, before)


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
    """Copies what the rank has, and exchanges the rest in one flat tensor each way, ordered by rank."""
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
    source, target = plan.src.box(plan.shape, place), plan.dst.box(plan.shape, place)
    sends, receives = plan.of(place)
    own = [p.box for p in receives if p.sender == place]
    sent = {p.receiver: p for p in sends if p.receiver != place}
    received = {p.sender: p for p in receives if p.sender != place}
    sizes = [
        tuple(pieces[r].elements if r in pieces else 0 for r in range(plan.src.ranks))
        for pieces in (sent, received)
    ]
    return _Packing(
        own=tuple((_within(box, target), _within(box, source)) for box in own),
        sent=tuple(_within(sent[r].box, source) for r in sorted(sent)),
        sent_sizes=sizes[0],
        received=tuple(_within(received[r].box, target) for r in sorted(received)),
        received_sizes=sizes[1],
    )


SENT = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "exchange": _exchange,
}  # fmt: skip


@lru_cache(maxsize=1 << 12)
def _order(step: Step, axes: tuple[int, ...], row: tuple[int, ...]) -> tuple[int, ...]:
    """Returns which of the parts that ``axes`` make each rank of a group has."""
    return tuple(step.before.part(axes, rank) for rank in row)


def _split(x: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
    """Returns the parts of ``x`` for each rank of a group, one after the other, as they are sent."""
    if dim == 0 and parts == tuple(range(len(parts))):
        return x.contiguous().view(len(parts), x.shape[0] // len(parts), *x.shape[1:])
    pieces = x.chunk(len(parts), dim)
    return torch.stack([pieces[part] for part in parts]).contiguous()  # stack keeps channels last


def _joined(got: torch.Tensor, dim: int, parts: tuple[int, ...]) -> torch.Tensor:
    """Joins the parts that came from each rank of a group to one tensor."""
    if dim == 0 and parts == tuple(range(len(parts))):
        return got.view(-1, *got.shape[2:])
    return torch.cat([got[parts.index(part)] for part in range(len(parts))], dim)


def _within(box: Box, base: Box) -> Slices:
    """Returns the slices of ``box`` in a tensor that has ``base``."""
    box = box.within(base)
    return tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))


def _moves_as_bytes(x: torch.Tensor) -> bool:
    """Returns true if a backend may not support the dtype: its bytes are sent, as nothing is computed."""
    return x.dtype not in (torch.float32, torch.float64)


def _flat(x: torch.Tensor) -> torch.Tensor:
    flat = x.contiguous().view(-1)
    return flat.view(torch.uint8) if _moves_as_bytes(x) else flat


@dataclass(frozen=True)
class _Step:
    """One operator: the ways in which it takes values, its outputs, and the ways not needed afterwards."""

    kernel: Kernel
    takes: tuple[int, ...]
    outs: tuple[int, ...]
    settles: tuple[RedistributionPair | None, ...]
    done: tuple[int, ...]


class StageProgram:
    """Runs ``sharded`` on the rank of ``groups``."""

    def __init__(self, sharded: ShardedGraph, groups: StageGroups, device: torch.device) -> None:
        self.sharded = sharded
        self.groups = groups
        self.device = device
        self.ways = tuple(taken(sharded, way) for way in sharded.taken)
        last = _last_uses(sharded)
        self.steps = tuple(
            _Step(
                kernel=self._kernel(at),
                takes=takes,
                outs=node.outs,
                settles=tuple(move_to_rest(sharded, v) for v in node.outs),
                done=tuple(way for way in dict.fromkeys(takes) if last[way] == at),
            )
            for at, (node, takes) in enumerate(zip(sharded.graph.nodes, sharded.takes, strict=True))
        )

    def run(
        self, inputs: Sequence[Tensor], params: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Returns the outputs, and the new values of buffers; all tensors are in the layouts of the graph."""
        graph = self.sharded.graph
        values = dict(zip(graph.inputs, inputs, strict=True))
        values |= {v: params[name] for name, v in graph.params if self.sharded.users[v]}
        remaining_uses = {v: len(self.sharded.users[v]) for v in range(len(graph.values))}
        got: dict[int, Tensor] = {}

        def take(way: int) -> Tensor:
            if way not in got:
                value = self.sharded.taken[way].value
                got[way] = self._moved(values[value], self.ways[way])
                remaining_uses[value] -= 1
                if not remaining_uses[value]:  # all ways to take it exist
                    del values[value]
            return got[way]

        for step in self.steps:
            made = step.kernel(*(take(way) for way in step.takes))
            for v, t, move in zip(step.outs, made, step.settles, strict=True):
                if remaining_uses[v]:
                    values[v] = self._moved(t, move)
            for way in step.done:
                del got[way]

        changes = {
            name: take(way) for (name, _), way in zip(graph.changes, self.sharded.changes, strict=True)
        }
        return [take(way) for way in self.sharded.returns], changes

    def _kernel(self, at: int) -> Kernel:
        graph, rule = self.sharded.graph, self.sharded.rules[at]
        node, strategy = graph.nodes[at], self.sharded.strategies[at]
        rule = rule or uncut_rule(node, graph)
        call = LocalCall.from_node(node, graph, rule, strategy, self.groups.rank)
        return prepare(call, InsideCollectives(self.groups), self.device)

    def _moved(self, t: Tensor, move: RedistributionPair | None) -> Tensor:
        if move is None:
            return t
        return redistribute(t, move.forward, move.backward, self.groups)


@dataclass(frozen=True)
class InsideCollectives:
    """Sums and maxima inside of operators, over the groups of a stage."""

    groups: StageGroups

    def sum(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        return self.groups.all_reduce(x.clone(), matrix, axes, "sum")

    def max(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        return self.groups.all_reduce(x.clone(), matrix, axes, "max")


def _last_uses(sharded: ShardedGraph) -> list[int]:
    """Returns the operator that takes each way last; outputs are kept to the end."""
    end = len(sharded.graph.nodes)
    out = [end] * len(sharded.taken)
    for at, takes in enumerate(sharded.takes):
        for way in takes:
            out[way] = at
    for way in (*sharded.returns, *sharded.changes):
        out[way] = end
    return out
