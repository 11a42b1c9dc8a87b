"""Makes a rank's part of a model: cuts, shards and compiles it."""

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
from launcher.parallel.dispatch.training_mode import Modes
from launcher.parallel.forward_changes import ForwardChanges, forward_changes
from launcher.parallel.fsdp.gather import GatherOrder, Prefetch, agree
from launcher.parallel.fsdp.reduce import ReduceOrder
from launcher.parallel.fsdp.shard import HalfWeights, half_weights, shard
from launcher.parallel.gradient_all_reduce import Bucketed, data_parallel_buckets, tensor_parallel_buckets
from launcher.parallel.half_precision import cast_frozen_weights
from launcher.parallel.mesh import Meshes
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.shared_state import steps_of_shared_state
from launcher.parallel.model_state.variables_read import VariablesRead, variables_of_model
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
from launcher.plan.values.optimizer import ParamGroup
from launcher.plan.values.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from launcher.parallel.compile_times import CompileTimes


@dataclass(frozen=True)
class Blueprint:
    """The model on the meta device, which a build then splits into stages and lays out.

    ``full_tensor`` returns the values of its tensors. ``axis`` is the tensor-parallel axis of its operators;
    no rank is set on it yet. ``tracer`` has traced its forward, if the model runs in several stages.
    """

    model: nn.Module
    full_tensor: FullTensorOf
    axis: Axis
    tracer: Tracer | None


def blueprint(
    model: nn.Module, full_tensor: FullTensorOf, plan: Plan, inputs: tuple[TensorSpec, ...]
) -> Blueprint:
    """Turns ``model`` (on the meta device) into what a rank of ``tp`` runs, and returns its blueprint."""
    axis = spread(model, plan)
    install(model, plan.recomputed, axis)
    cast_frozen_weights(model, plan)
    return Blueprint(model, full_tensor, axis, traced(model, plan, inputs))


@dataclass(frozen=True)
class ParallelModel:
    """One rank's share of a model, ready to train; ``reads``: the variables that all forwards use."""

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
    changes: ForwardChanges
    reads: VariablesRead
    compiled: CompileTimes | None = None
    weights: list[matrices.Weights] = field(default_factory=list)

    def train(self) -> None:
        """Sets training mode, as ``model.train()`` of the full model sets it for the modules of this rank."""
        self.modes.switch((p.module for p in self.parts), training=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Sets evaluation mode, and training mode on exit, as a loop does around a validation."""
        self.modes.switch((p.module for p in self.parts), training=False)
        try:
            yield
        finally:
            self.train()

    def named(self) -> list[tuple[Placed, torch.Tensor]]:
        """Returns this rank's tensors, the first copy of each, in the plan's order."""
        return named(self.parts, self.plan)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Returns every copy of every trainable parameter, for the optimizer.

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

    def param_groups(self) -> list[tuple[ParamGroup, list[tuple[str, nn.Parameter]]]]:
        """Returns the trainable parameters by the plan's groups, without those that this rank has none of."""
        at = {name: i for i, group in enumerate(self.plan.param_groups) for name in group.names}
        by_group: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, p in self.trainable():
            by_group.setdefault(at[self.first_name(name)], []).append((name, p))
        return [(self.plan.param_groups[i], by_group[i]) for i in sorted(by_group)]

    def layouts(self) -> dict[nn.Parameter, Layout]:
        """Returns the layout of each trainable parameter."""
        placed = {p.name: p.layout for p in self.plan.params}
        return {p: placed[self.first_name(name)] for name, p in self.trainable()}

    def first_name(self, name: str) -> str:
        """Returns the plan's name for a name of ``trainable``; names of modules may contain an @ too."""
        return name if name in self._names else name.rpartition("@")[0]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wraps all forwards and backwards: weights are gathered, in the dtype of the computation."""
        self.prefetch.start()
        for order in self.orders:
            order.compares = torch.is_grad_enabled()
        for weights in self.weights:
            weights.gather()
        with ExitStack() as stack:
            stack.enter_context(self.changes.watching_stages())
            for low in self.halves:
                stack.enter_context(low.running())
            yield
        self.prefetch.end()
        if not torch.is_grad_enabled():
            for weights in self.weights:
                weights.drop()

    def reduce(self) -> None:
        """Finishes, after the last backward of a step, all reductions that no action of the schedule did."""
        for order in self.reductions:
            order.end()
        for weights in self.weights:
            weights.reduce()
        agree(self.orders, self.meshes)
        for bucket in self.buckets:
            bucket.reduce()
        for tied in self.ties:
            tied.reduce()
        self.statistics.broadcast()


def named(parts: list[StagePart], plan: Plan) -> list[tuple[Placed, torch.Tensor]]:
    """Returns the tensors of a rank's ``parts``, the first copy of each, in the plan's order."""
    later_first = reversed(parts)  # so that the first copy overwrites later ones
    by_name = {p.name: (p, t) for part in later_first for p, _, t in part.named(plan.params)}
    return [by_name[p.name] for p in plan.params if p.name in by_name]


def parallelize(drawn: Blueprint, plan: Plan, meshes: Meshes, device: torch.device) -> ParallelModel:
    """Turns the model of a blueprint into this rank's stages, with values in place.

    The blueprint must not be used afterwards.
    """
    # this rank's stages, still without values
    drawn.axis.join(meshes.coords["tp"], meshes.tp)
    modes = Modes.from_model(drawn.model, copied(drawn.model))
    reads = variables_of_model(drawn.model, plan.leaves)
    parts = split(drawn.model, plan, meshes.coords["pp"], drawn.tracer, device=device)
    check_agreement(parts, drawn.full_tensor)
    common = None
    if len(plan.stages) > 1:
        common = steps_of_shared_state(drawn.model, [p.module for p in parts], hooks=plan.compilation is None)
    flatten(parts, plan)

    if plan.sharding is not None:
        matrices.cut_parameters(parts, plan)

    # parameters become this rank's shards and get their values; modules are compiled before FSDP2's hooks
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
        buckets += [*data_parallel_buckets(part, plan, meshes), *tensor_parallel_buckets(part, plan, meshes)]
    ties = tie(parts, plan, meshes)

    check(parts, plan, meshes.rank)
    halves = [half_weights(part, plan) for part in parts]
    shared = statistics(parts, plan, meshes)
    copied_weights = [w.kept for half in halves for w in half.weights]
    lost = [*(order.lost for order in orders), *(half.lost for half in halves)]
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
        statistics=shared,
        halves=halves,
        modes=modes,
        changes=forward_changes(named(parts, plan), plan, copied_weights, lost, shared, common),
        reads=reads,
        compiled=compiled,
        weights=weights,
    )
