"""Makes a rank's part of a model: cut, sharded, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.optional import matrices
from launcher.parallel.compile import compile_modules
from launcher.parallel.deferred_init.fill import FullTensorOf, fill
from launcher.parallel.digests import digests
from launcher.parallel.dispatch.training_mode import Modes
from launcher.parallel.fsdp.gather import GatherOrder, Prefetch, agree
from launcher.parallel.fsdp.reduce import ReduceOrder
from launcher.parallel.fsdp.shard import HalfWeights, half_weights, shard
from launcher.parallel.gradient_buckets import Bucketed, fuse, sums
from launcher.parallel.half_precision import narrow_frozen
from launcher.parallel.lost_changes import LostChanges
from launcher.parallel.mesh import Meshes, local
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.placement_check import check
from launcher.parallel.rank_agreement import check_agreement
from launcher.parallel.recompute import install
from launcher.parallel.running_statistics import Statistics, statistics
from launcher.parallel.stages import StagePart, flatten, split, traced
from launcher.parallel.tensor_parallel.apply import distribute, spread
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.parallel.tied_parameters import Tied, tie
from launcher.parallel.trace.code_between_modules import Tracer
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.plan import Plan
from launcher.plan.values.layout import Layout
from launcher.plan.values.module_names import listed
from launcher.plan.values.optimizer import ParamGroup
from launcher.plan.values.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from launcher.parallel.compile import CompileTimes


@dataclass(frozen=True)
class Blueprint:
    """The model on the meta device, which a build then splits into stages and lays out.

    ``full_tensor`` returns the values of its tensors. ``axis`` is the tensor-parallel axis of its operators,
    which belongs to no rank yet. ``tracer`` has traced its forward, if the model runs in several stages.
    """

    model: nn.Module
    full_tensor: FullTensorOf
    axis: Axis
    tracer: Tracer | None


def blueprint(
    model: nn.Module, full_tensor: FullTensorOf, plan: Plan, inputs: tuple[TensorSpec, ...]
) -> Blueprint:
    """Return the blueprint of ``model`` (on the meta device), turned into what a rank of ``tp`` runs."""
    axis = spread(model, plan)
    install(model, plan.recomputed, axis)
    narrow_frozen(model, plan)
    return Blueprint(model, full_tensor, axis, traced(model, plan, inputs))


@dataclass(frozen=True)
class ParallelModel:
    """One rank's share of a model, ready to train."""

    plan: Plan
    meshes: Meshes
    axis: Axis
    parts: list[StagePart]
    orders: list[GatherOrder]
    prefetch: Prefetch
    reductions: list[ReduceOrder]
    buckets: list[Bucketed]
    ties: list[Tied]
    statistics: Statistics
    halves: list[HalfWeights]
    modes: Modes
    compiled: CompileTimes | None = None
    weights: list[matrices.Weights] = field(default_factory=list)
    changed: LostChanges = field(default_factory=LostChanges)

    def train(self) -> None:
        """Set training mode, as ``model.train()`` of the full model sets it for the modules of this rank."""
        self.modes.switch((p.module for p in self.parts), training=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set evaluation mode, and training mode on exit, as a loop does around a validation."""
        self.modes.switch((p.module for p in self.parts), training=False)
        try:
            yield
        finally:
            self.train()

    def named(self) -> list[tuple[Placed, torch.Tensor]]:
        """Return this rank's tensors, the first copy of each, in the plan's order."""
        later_first = reversed(self.parts)  # so that the first copy overwrites later ones
        by_name = {p.name: (p, t) for part in later_first for p, _, t in part.named(self.plan.params)}
        return [by_name[p.name] for p in self.plan.params if p.name in by_name]

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return every copy of every trainable parameter, for the optimizer.

        A second copy's name ends in ``@stage``.
        """
        first: dict[str, torch.Tensor] = {}
        out = []
        for part in self.parts:
            for p, _, t in part.named(self.plan.params):
                if not p.trainable or not isinstance(t, nn.Parameter) or first.get(p.name) is t:
                    continue
                name = f"{p.name}@{part.stage.index}" if p.name in first else p.name
                out.append((name, t))
                first.setdefault(p.name, t)
        return out

    @property
    def groups(self) -> matrices.StageGroups | None:
        """The process groups of operators over device matrices, if there are any."""
        return self.weights[0].groups if self.weights else None

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(p.name for p in self.plan.params)

    @property
    def unread(self) -> bool:
        """True if ``lost`` would have to read what a device compared."""
        return bool(self.statistics.apart) or any(one.differences for one in self._lost)

    def largest_loss(self) -> torch.Tensor:
        """Return a number (fp64, 0-d): positive if ``lost`` has to read what a device compared."""
        largest = [d for one in self._lost if (d := one.largest()) is not None]
        largest += [apart.any().double() for _, apart in self.statistics.apart]
        return torch.stack(largest).max() if largest else torch.zeros((), dtype=torch.float64)

    def lost(self, any_differs: bool = True) -> str:
        """Return what forwards have changed where ranks cannot follow, and the way out; "" if nothing.

        ``any_differs``: whether ``largest_loss`` is positive, for callers that know it. What was compared is
        forgotten.
        """
        for one in self._lost:
            one.settle(any_differs)
        toggled, overwritten = self._toggled(), self._overwritten()
        apart = self.statistics.differing() if any_differs else []
        self.statistics.apart.clear()
        one_rank = "or train with one rank in fp32"
        if toggled:
            text = f"the forward changed requires_grad of {listed(toggled)}"
            cure = f"freeze it in the constructor, or detach() its output, {one_rank}"
        elif overwritten:
            text = f"the forward changed {listed(overwritten)}"
            cure = f"let the forward compute with a copy, {one_rank}"
        elif apart:
            text = f"the forward changed {listed(apart)} by the samples of one data-parallel rank"
            cure = "compute it from all samples, or train with one data-parallel rank"
        else:
            return ""
        return f"{text}, and this layout would train to other numbers; {cure}"

    def _overwritten(self) -> list[str]:
        """Return the parameters whose values a forward has changed where ranks cannot follow."""
        lost = set().union(*(one.overwritten for one in self._lost))
        return [placed.name for placed, t in self._parameters if id(t) in lost]

    def _toggled(self) -> list[str]:
        """Return the parameters whose ``requires_grad`` a forward has set where ranks cannot follow.

        A step may compute with copies of the parameters that are trained; in a pipeline forwards come before
        the backward of earlier micro batches.
        """
        lost = set().union(*(one.toggled for one in self._lost))
        return [
            placed.name
            for placed, t in self._parameters
            if id(t) in lost or (self.staged and t.requires_grad != placed.trainable)
        ]

    @property
    def _lost(self) -> list[LostChanges]:
        return [self.changed, *(order.lost for order in self.orders), *(low.lost for low in self.halves)]

    @property
    def staged(self) -> bool:
        """True if forwards come before the backward of earlier micro batches, which uses the same weights."""
        return len(self.plan.stages) > 1

    @cached_property
    def _used_by_stages(self) -> list[torch.Tensor]:
        """The parameters that stages compute with, no copies, and that no forward changed in the plan."""
        copied = {id(w.kept) for half in self.halves for w in half.weights}
        changes = {*self.plan.observed.changed}
        rows = self._parameters if self.staged else []
        return [
            t
            for placed, t in rows
            if not placed.sharded and id(t) not in copied and changes.isdisjoint(placed.names)
        ]

    @cached_property
    def _parameters(self) -> list[tuple[Placed, torch.Tensor]]:
        return [(placed, t) for placed, t in self.named() if not placed.buffer]

    def param_groups(self) -> list[tuple[ParamGroup, list[tuple[str, nn.Parameter]]]]:
        """Return the trainable parameters by the plan's groups, without those that are empty on this rank."""
        at = {name: i for i, group in enumerate(self.plan.param_groups) for name in group.names}
        by_group: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, p in self.trainable():
            by_group.setdefault(at[self.first_name(name)], []).append((name, p))
        return [(self.plan.param_groups[i], by_group[i]) for i in sorted(by_group)]

    def layouts(self) -> dict[nn.Parameter, Layout]:
        """Return the layout of each trainable parameter."""
        placed = {p.name: p.layout for p in self.plan.params}
        return {p: placed[self.first_name(name)] for name, p in self.trainable()}

    def first_name(self, name: str) -> str:
        """Return the plan's name of a parameter of ``trainable``; names of modules may contain an @ too."""
        return name if name in self._names else name.rpartition("@")[0]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter around every forward and backward: weights are gathered, in the dtype of the computation."""
        self.prefetch.start()
        for order in self.orders:
            order.compares = torch.is_grad_enabled()
        for weights in self.weights:
            weights.gather()
        memory = [(t, t.data_ptr()) for _, t in self._parameters if self.staged and type(t) is nn.Parameter]
        whole = self._used_by_stages if torch.is_grad_enabled() else []
        before = digests([*map(local, whole)]) if whole else None
        with ExitStack() as stack:
            for low in self.halves:
                stack.enter_context(low.running())
            yield
        # autograd refuses a backward after a write in place, but not after an exchange of the memory, or a
        # write through ``weight.data``
        self.changed.overwritten.update(id(t) for t, at in memory if t.data_ptr() != at)
        if before is not None:
            self.changed.differ(whole, before, digests([*map(local, whole)]))
        self.prefetch.end()
        if not torch.is_grad_enabled():
            for weights in self.weights:
                weights.drop()

    def reduce(self) -> None:
        """Finish, after the last backward of a step, the sums that no schedule action did."""
        for order in self.reductions:
            order.end()
        for weights in self.weights:
            weights.reduce()
        agree(self.orders, self.meshes)
        for bucket in self.buckets:
            bucket.reduce()
        for tied in self.ties:
            tied.reduce()
        self.statistics.share()


def parallelize(drawn: Blueprint, plan: Plan, meshes: Meshes, device: torch.device) -> ParallelModel:
    """Turn the model of a blueprint into this rank's stages, with values in place.

    The blueprint must not be used afterwards.
    """
    # this rank's stages, still without values
    drawn.axis.join(meshes.coords["tp"], meshes.tp)
    modes = Modes.from_model(drawn.model, copied(drawn.model))
    parts = split(drawn.model, plan, meshes.coords["pp"], drawn.tracer, device=device)
    check_agreement(parts, drawn.full_tensor)
    flatten(parts, plan)

    if plan.sharding is not None:
        matrices.cut_parameters(parts, plan)

    # parameters become this rank's shards and get their values; graphs exclude FSDP2's work
    distribute(parts, plan, meshes)
    compiled = compile_modules(parts, plan.compilation, drawn.axis)
    for part in parts:
        shard(part, plan, meshes)
    orders = [GatherOrder(part, plan) for part in parts]
    fill(parts, plan, meshes.rank, device, full_tensor=drawn.full_tensor)

    weights = []
    if plan.sharding is not None:
        weights = matrices.run_sharded(parts, plan, matrices.stage_groups(plan, meshes), device)

    # what keeps copies equal: sums of gradients over replicas and tp, and over stages that share a tensor
    buckets = []
    for part in parts:
        buckets += [*fuse(part, plan, meshes), *sums(part, plan, meshes)]
    ties = tie(parts, plan, meshes)

    check(parts, plan, meshes.rank)
    return ParallelModel(
        plan=plan,
        meshes=meshes,
        axis=drawn.axis,
        parts=parts,
        orders=orders,
        prefetch=Prefetch(plan.gathers[meshes.coords["pp"]], orders),
        reductions=[ReduceOrder(order, plan) for order in orders],
        buckets=buckets,
        ties=ties,
        statistics=statistics(parts, plan, meshes),
        halves=[half_weights(part, plan) for part in parts],
        modes=modes,
        compiled=compiled,
        weights=weights,
    )
