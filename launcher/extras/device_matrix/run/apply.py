"""Makes a stage that runs over device matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from launcher.extras.device_matrix.all_to_all_v import rows_over
from launcher.extras.device_matrix.communication_groups import collective_rows
from launcher.extras.device_matrix.hsdp import ShardedParam
from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.resolve import Sharding
from launcher.extras.device_matrix.run.program import StageGroups, StageProgram, carry_out, redistribute
from launcher.extras.device_matrix.run.regather import Regather
from launcher.extras.device_matrix.sharded_graph import gathered, reduced
from launcher.parallel.local_tensors import cut as part_of
from launcher.parallel.mesh import Meshes
from launcher.parallel.model_state.deep_copy import HOOKS
from launcher.parallel.output_share import OutputShare
from launcher.parallel.stages import StagePart
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.plan import Plan
from launcher.plan.values.layout import Layout


class Weights(Mapping[str, Tensor]):
    """The weights that operators take, by first name, in the layouts that they take.

    Args:
        level: for weights sharded over replicas. level1 and level2 gather them once per step; level2 also
            reduces the gradient of each micro batch at once. level3 gathers for each forward, and again for
            its backward (``Regather``).
        names: the names of tensors in ``module`` that are not their first names.
        several: weights that another stage of this rank has too; their terms of a gradient must not be added
            to ours before they are reduced.
    """

    def __init__(
        self,
        module: nn.Module,
        params: tuple[ShardedParam, ...],
        level: str | None,
        groups: StageGroups,
        names: Mapping[str, str],
        several: frozenset[str] = frozenset(),
    ) -> None:
        self.params = {p.name: p for p in params}
        self.level = level
        self.groups = groups
        self.places = {p.name: _place(module, names.get(p.name, p.name)) for p in params}
        self.leaves = [n for n, p in self.params.items() if _leaf(p, level, n in several)]
        self.gathered: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.regather = Regather(groups)

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.leaves:
            return self.gathered[name]
        p, kept = self.params[name], self.kept(name)
        if not p.shared:
            return kept
        full = redistribute(kept, gathered(p), reduced(p), self.groups)
        self.regather.enter(name, full, kept, gathered(p))
        return full

    def kept(self, name: str) -> Tensor:
        """Returns the tensor as it is stored."""
        module, attr = self.places[name]
        t: Tensor = getattr(module, attr)
        return t

    def replace(self, name: str, t: Tensor) -> None:
        """Replaces a buffer by a copy of ``t``, as a backward may need the old one.

        ``t`` may be a weight itself, which the optimizer changes later.
        """
        module, attr = self.places[name]
        setattr(module, attr, t.detach().clone())

    def gather(self) -> None:
        """Gathers before the first forward of a step or of an evaluation, in the dtype of the computation."""
        for name in self.leaves:
            p, shard = self.params[name], self.kept(name)
            computed = shard.detach().to(dtype_of(p.spec.dtype))
            full = carry_out(computed, gathered(p), self.groups)
            if shard.requires_grad and torch.is_grad_enabled():
                full.requires_grad_()
                if self._at_once(p) or full.dtype != shard.dtype:
                    full.register_post_accumulate_grad_hook(partial(self._after_backward, name, shard))
            self.gathered[name] = full

    def drop(self) -> None:
        """Frees the gathered weights, after the last forward of an evaluation."""
        self.gathered.clear()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduces the gradients, after the last backward of a step."""
        for name, p in self.params.items():
            shard = self.kept(name)
            if name in self.gathered:
                grad = self.sums.pop(name, self.gathered[name].grad)
                if grad is not None:
                    self._bring_back(p, shard, grad)
            elif not p.shared and p.terms and shard.grad is not None:
                shard.grad = carry_out(shard.grad, reduced(p), self.groups)
        self.drop()

    @torch.no_grad()
    def _after_backward(self, name: str, shard: Tensor, full: Tensor) -> None:
        """Reduces (level2) or adds up (level1) the gradient of a micro batch, in the dtype of the weight."""
        assert full.grad is not None
        grad, full.grad = full.grad.to(shard.dtype), None
        if self._at_once(self.params[name]):
            self._bring_back(self.params[name], shard, grad)
        else:
            self.sums[name] = self.sums[name].add_(grad) if name in self.sums else grad

    def _at_once(self, p: ShardedParam) -> bool:
        return p.shared and self.level == "level2"

    def _bring_back(self, p: ShardedParam, shard: Tensor, grad: Tensor) -> None:
        """Reduces the gradient of a gathered weight to the shard."""
        mine = carry_out(grad, reduced(p), self.groups)
        shard.grad = mine if shard.grad is None else shard.grad.add_(mine)


def _leaf(p: ShardedParam, level: str | None, several: bool) -> bool:
    """Returns true if a step computes with a separate tensor in addition to the stored one."""
    return (p.shared and level != "level3") or (several and bool(p.terms))


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module and attribute of a tensor; a forward may replace the tensor there."""
    owner, _, attr = name.rpartition(".")
    return module.get_submodule(owner), attr


def cut_parameters(parts: list[StagePart], plan: Plan) -> None:
    """Replaces each parameter (on meta) by one of the shape of this rank's part; ties stay ties."""
    if plan.sharding is None:
        return
    shapes = {n: p.layout.box(_holder(p.layout)) for p in plan.params for n in p.names}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in parts:
        for path, module in part.module.named_modules():
            for attr, p in list(module._parameters.items()):
                box = shapes.get(f"{path}.{attr}".lstrip("."))
                if p is None or box is None:
                    continue
                if p not in made:
                    made[p] = nn.Parameter(p.detach().new_empty(box.shape), p.requires_grad)
                    made[made[p]] = made[p]
                module._parameters[attr] = made[p]


def stage_groups(plan: Plan, meshes: Meshes) -> StageGroups | None:
    """Makes the process groups of this rank's stages; all ranks call this together."""
    if plan.sharding is None:
        return None
    grid = plan.sizes.grid
    stages = [grid.ranks(pp=pp) for pp in range(grid["pp"])]
    needs = [collective_rows(plan.sharding, plan.sizes.stages_of(pp)) for pp in range(grid["pp"])]
    return StageGroups.build(stages, needs, stage_group=meshes.tp)


def _holder(layout: Layout) -> int:
    """Returns a rank that has a part of the tensor; all parts have the same size."""
    return layout.grid.ranks(pp=dict(layout.at)["pp"][0])[0]


def run_sharded(
    parts: list[StagePart], plan: Plan, groups: StageGroups | None, device: torch.device
) -> list[Weights]:
    """Makes stages run operator by operator from now on."""
    if plan.sharding is None or groups is None:
        return []
    out = []
    counts = Counter(p.name for part in parts for p, _, _ in part.named(plan.params))
    several = frozenset(name for name, n in counts.items() if n > 1)
    for part in parts:
        stage = plan.sharding.stages[part.stage.index]
        names = {p.name: name for p, name, _ in part.named(plan.params)}
        level = plan.sharding.level
        weights = Weights(part.module, stage.params, level, groups, names=names, several=several)
        forward = StageForward(
            part.module,
            StageProgram(stage.train, groups, device),
            StageProgram(stage.evaluate, groups, device),
            weights,
            full_inputs=part.stage.index == 0,
            last=part.stage.index == len(plan.stages) - 1,
        )
        part.module.forward = forward
        for hooks in HOOKS:
            vars(part.module)[hooks].clear()  # they are part of the recording
        out.append(weights)
    return out


class StageForward:
    """The forward of a stage.

    ``full_inputs``: its inputs arrive as full tensors. ``last``: it returns what the model returns.
    """

    def __init__(
        self,
        module: nn.Module,
        train: StageProgram,
        evaluate: StageProgram,
        weights: Weights,
        *,
        full_inputs: bool,
        last: bool,
    ) -> None:
        self.module = module
        self.programs = {True: train, False: evaluate}
        self.weights = weights
        self.full_inputs = full_inputs
        self.last = last

    def __call__(self, *inputs: Tensor) -> Any:
        program = self.programs[self.module.training]
        graph = program.sharded
        parts = list(inputs)
        if self.full_inputs:
            parts = [self._mine(graph, v, x) for v, x in zip(graph.graph.inputs, inputs, strict=True)]
        with self.weights.regather:
            outs, changes = program.run(parts, self.weights)
        for name, t in changes.items():
            self.weights.replace(name, t)
        return outs[0] if self.last and len(outs) == 1 else tuple(outs)

    def _mine(self, graph: Any, value: int, x: Tensor) -> Tensor:
        layout = graph.layouts[value]
        return part_of(x, layout.box(tuple(x.shape), self.weights.groups.rank)).contiguous()


@dataclass(frozen=True)
class MatrixShare(OutputShare):
    """A rank's part of an output with ``layout``, in which this rank is number ``rank`` of its stage."""

    layout: TensorLayout
    rank: int

    def targets(self, full: Tensor) -> Tensor:
        """Returns the targets of this rank's part of the output: split as the micro batch's samples are."""
        for dim, axes in enumerate(self.layout.dims[:-1]):
            if axes and dim < full.dim():
                size = full.shape[dim] // self.layout.slices[dim]
                full = full.narrow(dim, self.layout.part(axes, self.rank) * size, size)
        return full


def matrix_share(sharding: Sharding, rank: int, groups: StageGroups | None) -> MatrixShare:
    """Returns the share of the output in training; ``rank`` is the number in the last stage.

    The output is repeated over some axes of the matrix, and its classes are split over others.
    """
    train = sharding.stages[-1].train
    layout = train.taken[train.returns[0]].layout
    last = layout.dims[-1] if layout.dims else ()
    at = layout.coords(rank)
    counts = not any(at[a] for a in (*layout.repeated, *last))
    if groups is None or not last or layout.slices[-1] == 1:
        return MatrixShare(None, counts, layout, rank)
    group, _ = groups.of(rows_over(layout.matrix, tuple(sorted(last))))
    return MatrixShare(Axis(layout.slices[-1], layout.part(last, rank), group), counts, layout, rank)
