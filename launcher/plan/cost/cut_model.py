"""A model cut into stages, its parameters placed on ranks: what refusals and costs are worked out of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from launcher.job.schema.parallel import Hsdp
from launcher.plan.cost.fusion import Group
from launcher.plan.cost.gather_order import Visit
from launcher.plan.partition.params import Placed, Tie, by_stage
from launcher.plan.partition.sizes import Sizes
from launcher.plan.partition.stages import Crossing, Stage, covers
from launcher.plan.schedule.actions import Schedule
from launcher.plan.schedule.schedules import RULES
from launcher.plan.values.compilation import Compilation
from launcher.plan.values.facts import Graph
from launcher.plan.values.precision import Precision


@dataclass(frozen=True)
class CutModel:
    """``graphs``: of whole micro batches, or one a piece of so many ``lengths`` positions.

    ``boundaries[s]``: what leaves stage s for the next. ``hsdp``: ``None`` too where one rank has all shards.
    ``tp``: operators are cut over it. ``keeps_messages``: as ``TracedModel`` has it. ``compilation``:
    what torch compiles.
    """

    sizes: Sizes
    dtypes: Precision
    hsdp: Hsdp | None
    scheduler: str
    schedule: Schedule
    stages: tuple[Stage, ...]
    graphs: tuple[Graph, ...]
    lengths: tuple[int, ...]
    boundaries: tuple[tuple[Crossing, ...], ...]
    params: tuple[Placed, ...]
    ties: tuple[Tie, ...]
    groups: tuple[Group, ...]
    visits: tuple[tuple[Visit, ...], ...]
    tp: bool
    keeps_messages: bool
    compilation: Compilation | None = None

    @property
    def loss_compiled(self) -> bool:
        """Whether the loss takes logits as they are, in few kernels."""
        return self.compilation is not None and self.compilation.joins and self.compilation.loss

    @cached_property
    def named(self) -> Mapping[str, Placed]:
        """Parameters by all their names."""
        return {n: p for p in self.params for n in p.names}

    @cached_property
    def held(self) -> Mapping[int, list[Placed]]:
        """Those of each stage that has any, in definition order."""
        return by_stage(self.params)

    @property
    def mixed(self) -> bool:
        """Whether the model runs in half precision."""
        return self.dtypes.mixed

    @property
    def split(self) -> bool:
        """Whether backwards are cut in two: gradients of inputs, gradients of weights."""
        return len(self.stages) > 1 and RULES[self.scheduler].split

    @property
    def sharded(self) -> bool:
        return any(p.sharded for p in self.params)

    def stage_of(self, module: str) -> int | None:
        """The stage that runs all of ``module``; ``None`` when the glue between stages is a part of it."""
        if len(self.stages) == 1:
            return 0
        return next((s.index for s in self.stages if any(covers(m, module) for m in s.modules)), None)
