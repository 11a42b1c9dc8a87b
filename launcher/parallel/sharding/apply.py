"""Makes a stage run its operators over device matrices: splits its parameters, and replaces its forward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from launcher.parallel.local import cut as part_of
from launcher.parallel.mesh import Meshes
from launcher.parallel.model_state.deep_copy import HOOKS
from launcher.parallel.sharding.process_groups import StageGroups
from launcher.parallel.sharding.stage_program import StageProgram
from launcher.parallel.sharding.weights import Weights
from launcher.parallel.stages.split import StagePart
from launcher.plan.plan import Plan
from launcher.plan.sharding.meeting_ranks import meeting_ranks
from launcher.plan.values.layout import Layout


def cut_parameters(parts: list[StagePart], plan: Plan) -> None:
    """Replace each parameter (on meta) by one of the shape of this rank's part; ties stay ties."""
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
    """Make the process groups of this rank's stages; all ranks call this together."""
    if plan.sharding is None:
        return None
    grid = plan.sizes.grid
    stages = [grid.ranks(pp=pp) for pp in range(grid["pp"])]
    needs = [meeting_ranks(plan.sharding, plan.sizes.held(pp)) for pp in range(grid["pp"])]
    return StageGroups.build(stages, needs, whole=meshes.tp)


def _holder(layout: Layout) -> int:
    """Return a rank that has a part of the tensor; all parts have the same size."""
    return layout.grid.ranks(pp=dict(layout.at)["pp"][0])[0]


def run_sharded(
    parts: list[StagePart], plan: Plan, groups: StageGroups | None, device: torch.device
) -> list[Weights]:
    """Make stages run operator by operator from now on."""
    if plan.sharding is None or groups is None:
        return []
    out = []
    held = Counter(p.name for part in parts for p, _, _ in part.named(plan.params))
    several = frozenset(name for name, n in held.items() if n > 1)
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
            whole=part.stage.index == 0,
            last=part.stage.index == len(plan.stages) - 1,
        )
        part.module.forward = forward
        for hooks in HOOKS:
            vars(part.module)[hooks].clear()  # they are part of the recording
        out.append(weights)
    return out


class StageForward:
    """The forward of a stage.

    ``whole``: its inputs arrive as full tensors. ``last``: it returns what the model returns.
    """

    def __init__(
        self,
        module: nn.Module,
        train: StageProgram,
        evaluate: StageProgram,
        weights: Weights,
        *,
        whole: bool,
        last: bool,
    ) -> None:
        self.module = module
        self.programs = {True: train, False: evaluate}
        self.weights = weights
        self.whole = whole
        self.last = last

    def __call__(self, *inputs: Tensor) -> Any:
        program = self.programs[self.module.training]
        graph = program.sharded
        given = list(inputs)
        if self.whole:
            given = [self._mine(graph, v, x) for v, x in zip(graph.graph.inputs, inputs, strict=True)]
        with self.weights.regather:
            outs, changes = program.run(given, self.weights)
        for name, t in changes.items():
            self.weights.replace(name, t)
        return outs[0] if self.last and len(outs) == 1 else tuple(outs)

    def _mine(self, graph: Any, value: int, x: Tensor) -> Tensor:
        layout = graph.layouts[value]
        return part_of(x, layout.box(tuple(x.shape), self.weights.groups.rank)).contiguous()
