"""The order of all-gathers and reductions, and the prefetching of gathers.

FSDP2 gathers a group of weights when one of its modules is called, and reduces the gradients that exist when
backward has passed it. If code reads values, ranks may call different modules: they would gather and reduce
different weights, unnoticed if sizes are equal. Here a collective runs only in its turn of the plan
(``Plan.visits``), with zeros for gradients that a rank lacks. If weights are gathered in forward and backward
(level3), a rank runs the collectives that it has skipped before the next one. Otherwise (level2) reductions
out of turn wait for the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from launcher.errors import RunError
from launcher.parallel.copied_weight_changes import LostChanges, Used, state_of
from launcher.parallel.fsdp.shard import SUMS_APART, end_backward, param_groups
from launcher.parallel.local_tensors import local
from launcher.parallel.mesh import Meshes, flags, to_host
from launcher.parallel.split_backward import Rounding
from launcher.parallel.stages import StagePart
from launcher.plan.communication.buckets_and_gathers import GatherGroup
from launcher.plan.communication.gather_order import Gathering
from launcher.plan.plan import Plan

IN_ANY_ORDER = (
    "parallel.hsdp.optimizer_level=level1 parallel.transformer_opt.grad_computation_allreduce_overlap=false"
)
"""Overrides with which gradients may come in any order, and more than once: they are reduced after a step."""


@dataclass(frozen=True)
class Turn:
    """A collective that is due for ``group``.

    ``kind`` is ``forward`` (gather), ``backward`` (gather), ``pause`` or ``reduce``. ``pause``: a backward
    has passed the group but will pass it again, because its modules ran more than once.
    """

    kind: str
    group: int


def _gathered(p: Any) -> torch.Tensor:
    """Returns the tensor of FSDP2's record ``p`` that modules compute with."""
    tensor: torch.Tensor = getattr(p, "_unsharded_param", p.sharded_param)
    return tensor


def _piece(p: Any) -> Used:
    """Returns this rank's piece of the tensor that modules compute with, and its shard."""
    full, shard = local(p._unsharded_param), local(p.sharded_param)
    dim, n = p.fsdp_placement.dim, p.mesh_info.shard_mesh_size
    first = min(-(-full.shape[dim] // n) * p.mesh_info.shard_mesh_rank, full.shape[dim])
    return Used(p.sharded_param, shard, full.narrow(dim, first, shard.shape[dim]))


class GatherOrder:
    """The sharded groups of one part, and the collectives that the current pass still has to do.

    ``present`` has the parameters (by id of their shard) that had a gradient since ``agree``. ``see`` is
    called with shards and full gradients right before these are reduced, for parameters with a gradient on
    this rank. ``before_use`` is called with a group before one of its modules is called. ``lost`` has the
    changes that modules made to gathered weights, which the next gather undoes; it has changes of values only
    if ``compares`` is true.
    """

    def __init__(self, part: StagePart, plan: Plan) -> None:
        self.part = part
        self.rows = {i: g for i, g in enumerate(plan.groups) if g.stage == part.stage.index and plan.hsdp}
        self.groups = {i: _group(part, g) for i, g in self.rows.items()}
        self.present: set[int] = set()
        self.lost = LostChanges()
        self.compares = True
        self._seen: dict[int, tuple[int, int]] = {}
        self.see: Callable[[list[torch.Tensor], list[torch.Tensor]], None] | None = None
        self.before_use: Callable[[int], None] | None = None

        # the turns of a pass, as planned
        visits = plan.visits[part.stage.index] if self.rows else ()
        self._forward = [Turn("forward", v.group) for v in visits if v.begins]
        self._gathers = plan.hsdp is not None and plan.hsdp.optimizer_level == "level3"
        back = _backward([(v.group, v.begins) for v in visits if self.rows[v.group].backward])
        self._backward = [t for t in back if self._gathers or t.kind != "backward"]
        self._before = _chain(self.rows)

        # the pass that is running
        self._turns: list[Turn] | None = None
        self._at = 0
        self._filling = False

        for i, group in self.groups.items():
            group.pre_forward = partial(self._enter, i, group.pre_forward)
            group.post_forward = partial(self._leave, i, group.post_forward)
            group.pre_backward = partial(self._gather, i, group.pre_backward)
            group.post_backward = partial(self._reduce, i, group.post_backward)
            group._to_sharded = partial(self._free, i, group._to_sharded)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enters around a forward; it has turns only at level3, which gathers in the forward."""
        with self._pass(self._forward if self._gathers else None):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Enters around a backward whose gradients are reduced while it runs."""
        with self._pass(self._backward):
            yield

    @contextmanager
    def _pass(self, turns: list[Turn] | None) -> Iterator[None]:
        self._turns, self._at = turns, 0
        try:
            yield
            if turns is not None and self._at < len(turns):
                self._catch_up(len(turns))
                if turns is self._backward:
                    end_backward(self._root())
        finally:
            self._turns = None

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Enters around reductions of all groups, in FSDP2's order, which is that of the modules."""
        self._filling = True
        try:
            yield
        finally:
            self._filling = False

    def params(self) -> list[Any]:
        """Returns FSDP2's record of each trainable parameter, in the same order on every rank."""
        return [p for g in self.groups.values() for p in g.fsdp_params if p.sharded_param.requires_grad]

    def _root(self) -> Any:
        return fully_shard.state(self.part.module)  # type: ignore[attr-defined]

    def _enter(self, i: int, enter: Any, *args: Any) -> Any:
        """Runs before a module of group ``i`` is called."""
        if torch.is_inference_mode_enabled():  # the backward gathers again, outside of inference mode
            with torch.inference_mode(False), torch.no_grad():
                return self._enter(i, enter, *args)

        # nothing is due outside of a pass, nor if another module of the group has begun the turn
        group = self.groups[i]
        if self.before_use is not None:
            self.before_use(i)
        begun = group._training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
        if self._turns is None or begun:
            out = enter(*args)
        else:
            if self._turns is self._backward:  # recomputed in the backward
                at = self._next(i, "backward")
                if at is not None:
                    self._catch_up(at)
            elif not self._take(i, "forward") and not group.is_unsharded:
                raise self._out_of_order(i, "is called")
            out = enter(*args)
        if not begun:
            self._seen.update((id(p), state_of(_gathered(p))) for p in group.fsdp_params)
        return out

    def _leave(self, i: int, leave: Any, *args: Any) -> Any:
        """Runs after a module of group ``i`` is called."""
        for p in self.groups[i].fsdp_params:
            self.lost.note(p.sharded_param, _gathered(p), self._seen[id(p)])
        return leave(*args)

    def _free(self, i: int, free: Any) -> None:
        """Compares this rank's piece of each gathered weight of group ``i`` with its shard; frees them."""
        if self.compares and self.groups[i].is_unsharded:
            params = self.groups[i].fsdp_params
            self.lost.compare([_piece(p) for p in params if hasattr(p, "_unsharded_param")])
        free()

    def _gather(self, i: int, gather: Any, *args: Any) -> None:
        """Runs before backward passes group ``i``.

        ``args`` says whether FSDP2 may prefetch by its own rule.
        """
        self._round(i)
        if not self._gathers:
            gather(False)  # all weights are gathered; FSDP2 might prefetch freed ones
            return
        passes = self._turns is self._backward
        if not passes or self.groups[i]._training_state == TrainingState.PRE_BACKWARD:
            gather(*args)
        elif self._take(i, "backward") or all(t.group != i for t in self._backward):
            gather(False)
            self._ahead(i)

    def _round(self, i: int) -> None:
        """Rounds gradients to the precision of their weight, as in one process.

        Since torch 2.15 FSDP2 accepts wider gradients. An RMSNorm computes the gradient of a half-precision
        weight in float32, and the gradients of two uses of a table are summed in float32.
        """
        for p in self.groups[i].fsdp_params:
            unsharded = getattr(p, "_unsharded_param", None)
            if unsharded is None or not unsharded.requires_grad or unsharded._backward_hooks:
                continue
            if unsharded.grad_dtype != unsharded.dtype:
                unsharded.register_hook(Rounding(unsharded.dtype))

    def _reduce(self, i: int, reduce: Any, *unused: Any) -> None:
        """Runs after backward has passed group ``i``."""
        group = self.groups[i]
        due = self._due(i) if group.reduce_grads else ""
        if due == "reduce":
            self.fill_missing_gradients(i)
        if due == "pause":
            group.reduce_grads = False
        if not due and group.reduce_grads and any(unreduced(p) is not None for p in group.fsdp_params):
            raise self._out_of_order(i, "gets gradients")
        reduce()
        if due == "pause":
            group.reduce_grads = True

    def _due(self, i: int) -> str:
        """Returns the turn of group ``i``: "reduce", "pause", or "" if no gradient of it should be left."""
        if self._filling:
            return "reduce"
        at = self._next(i, "pause", "reduce") if self._turns is self._backward else None
        if at is not None and at > self._at and not self._gathers:
            return "pause"
        turn = self._take(i, "pause", "reduce") if at is not None else None
        return turn.kind if turn else ""

    def _next(self, i: int, *kinds: str) -> int | None:
        for n, turn in enumerate(self._turns or []):
            if n >= self._at and turn.group == i and turn.kind in kinds:
                return n
        return None

    def _take(self, i: int, *kinds: str) -> Turn | None:
        """Takes the next turn of group ``i``, after all turns before it; ``None`` if it has none left."""
        at = self._next(i, *kinds)
        if at is None or self._turns is None:
            return None
        self._catch_up(at)
        self._at = at + 1
        return self._turns[at]

    def _catch_up(self, until: int) -> None:
        """Runs the collectives before turn ``until`` that this rank has skipped: other ranks may run them."""
        assert self._turns is not None
        while self._at < until:
            at = self._at
            turn = self._turns[at]
            group = self.groups[turn.group]

            # gather and free, gather for the backward, or reduce zeros
            if turn.kind == "forward":
                with group.use_training_state(TrainingState.FORWARD):
                    group.unshard(group.unshard_async_op)
                    group.wait_for_unshard()
                    group.reshard()
            elif turn.kind == "backward":
                group.pre_backward(False)
            else:
                group.post_backward()
            self._at = at + 1

    def _ahead(self, i: int) -> None:
        """Prefetches the group that backward needs next.

        FSDP2's own rule depends on the forwards that this rank ran.
        """
        before = self._before.get(i)
        if before is not None:
            group = self.groups[before]
            group._prefetch_unshard(group, "backward")

    def fill_missing_gradients(self, i: int) -> None:
        """Adds zeros for the gradients that this rank lacks; all in one dtype, as FSDP2 requires."""
        # the gradients that exist
        params = [p for p in self.groups[i].fsdp_params if p.sharded_param.requires_grad]
        if SUMS_APART:
            for p in params:
                p.accumulate_unsharded_grad_if_needed()
        has = [p for p in params if unreduced(p) is not None]
        self.present |= {id(p.sharded_param) for p in has}
        if self.see is not None and has:
            grads = [unreduced(p) for p in has]
            self.see([p.sharded_param for p in has], [g for g in grads if g is not None])

        # those that are missing
        if len(has) == len(params):
            return
        for p in params:
            if unreduced(p) is None:
                unsharded = p.unsharded_param
                unsharded.grad = torch.zeros_like(unsharded, dtype=unsharded.grad_dtype)
        if SUMS_APART and any(p.unsharded_accumulated_grad is not None for p in params):
            for p in params:
                p.to_accumulated_grad_if_needed()

    def _out_of_order(self, i: int, action: str) -> RunError:
        row = self.rows[i]
        names = ", ".join(m or "the model" for m in row.modules)
        text = f"{names} (stage {row.stage}) {action} more often than planned, or in another order"
        return RunError(f"{text}; with {IN_ANY_ORDER} any order is possible")


def _group(part: StagePart, row: GatherGroup) -> Any:
    module = part.module.get_submodule(row.modules[0])
    (group,) = param_groups(fully_shard.state(module))  # type: ignore[attr-defined]
    return group


def _chain(rows: dict[int, GatherGroup]) -> dict[int, int]:
    """Returns for each group the one to prefetch while backward passes it; for the root, the last group."""
    units = [i for i, g in rows.items() if g.modules != ("",)]
    out = {i: before for before, i in pairwise(units) if rows[i].chained}
    return out | {i: units[-1] for i, g in rows.items() if g.modules == ("",) and units}


def _backward(visits: list[tuple[int, bool]]) -> Iterator[Turn]:
    """Yields the turns of a backward: autograd passes the forward's visits in reverse."""
    first = {group: n for n, (group, begins) in reversed([*enumerate(visits)]) if begins}
    for n, (group, begins) in reversed([*enumerate(visits)]):
        over = "reduce" if first.get(group) == n else "pause"
        yield Turn(over if begins else "backward", group)


def unreduced(p: Any) -> torch.Tensor | None:
    """Returns the gradient of FSDP2's parameter that is not reduced yet, or ``None``."""
    summed: torch.Tensor | None = p.unsharded_accumulated_grad
    return p._unsharded_param.grad if summed is None and hasattr(p, "_unsharded_param") else summed


@torch.no_grad()
def agree(orders: list[GatherOrder], meshes: Meshes) -> None:
    """Sets gradients to ``None`` after a step if every rank missed them in every micro batch.

    With zeros an optimizer would decay the weight.
    """
    params = [p for order in orders for p in order.params()]
    if not params:
        return

    present = set().union(*(order.present for order in orders))
    for order in orders:
        order.present.clear()

    # present on any rank
    has = [id(p.sharded_param) in present for p in params]
    flagged = flags(has, params[0].sharded_param.device, torch.uint8)
    dist.all_reduce(flagged, op=dist.ReduceOp.MAX, group=meshes.dp)
    if not all(has):
        for p, anywhere in zip(params, to_host(flagged).tolist(), strict=True):
            if not anywhere:
                p.sharded_param.grad = None


class Prefetch:
    """The gathers of a rank over all of its stages, and how many of them have begun.

    Every rank begins its gathers in the plan's order, even if its data makes it skip code. FSDP2 waits for
    each when a module of the group is first called.
    """

    def __init__(self, turns: tuple[Gathering, ...], orders: Iterable[GatherOrder]) -> None:
        of = {i: order for order in orders for i in order.rows}
        self._turns = turns
        self._orders = [of[t.group] for t in turns]
        self._at = {t.group: n for n, t in enumerate(turns)}
        self._begun = len(turns)
        self._settled: set[int] = set()
        for order in self._orders:
            order.before_use = self.reach

    def start(self) -> None:
        """Begins a step or an evaluation, after the optimizer has updated the weights."""
        self.end()  # after a step that failed
        self._begun = 0
        self._settled.clear()
        if self._turns:
            self.reach(self._turns[0].group)

    def reach(self, group: int) -> None:
        """Begins the gathers that are due before ``group`` is used."""
        until = self._turns[self._at[group]].until
        while self._begun < until:
            next_group = self._orders[self._begun].groups[self._turns[self._begun].group]
            next_group.lazy_init()
            next_group.unshard(async_op=True)
            self._begun += 1

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Enters around a forward of ``stage``.

        After its first forward all of its groups are gathered, used or not.
        """
        if stage in self._settled:
            yield
            return
        mine = [n for n, order in enumerate(self._orders) if order.part.stage.index == stage]
        self._wait(n for n in mine if self._turns[n].early)
        yield
        self._wait(mine)
        self._settled.add(stage)

    def _wait(self, turns: Iterable[int]) -> None:
        for n in turns:
            group = self._turns[n].group
            self.reach(group)
            self._orders[n].groups[group].wait_for_unshard()

    def end(self) -> None:
        """Frees the weights that no backward has freed, such as those of an evaluation."""
        for turn, order in zip(self._turns, self._orders, strict=True):
            group = order.groups[turn.group]
            group.wait_for_unshard()
            group._to_sharded()
