"""A model cut into stages, with its parameters placed on ranks: the input of refusals and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from launcher.job.schema.parallel import Hsdp
from launcher.plan.communication.buckets_and_gathers import GatherGroup
from launcher.plan.communication.gather_order import Visit
from launcher.plan.cut.stages import BoundaryTensor, Stage, covers
from launcher.plan.cut.tensor_placement import Placed, Tie, by_stage
from launcher.plan.schedule.schedules import RULES, Schedule
from launcher.plan.sizes import Sizes
from launcher.plan.values.compilation import Compilation
from launcher.plan.values.model_graph import Graph
from launcher.plan.values.precision import Precision


@dataclass(frozen=True)
class CutModel:
    """A model cut into stages and placed on ranks.

    ``graphs`` has one graph of a full micro batch, or one per piece; ``lengths`` are the positions of the
    pieces. ``boundaries[s]`` is what stage s sends to the next. ``hsdp`` is ``None`` also if one rank has all
    shards. ``tp``: some operators are cut over ``tp``. ``keeps_messages`` is that of ``TracedModel``.
    ``compilation`` is what torch compiles.
    """

    sizes: Sizes
    dtypes: Precision
    hsdp: Hsdp | None
    scheduler: str
    schedule: Schedule
    stages: tuple[Stage, ...]
    graphs: tuple[Graph, ...]
    lengths: tuple[int, ...]
    boundaries: tuple[tuple[BoundaryTensor, ...], ...]
    params: tuple[Placed, ...]
    ties: tuple[Tie, ...]
    groups: tuple[GatherGroup, ...]
    visits: tuple[tuple[Visit, ...], ...]
    tp: bool
    keeps_messages: bool
    compilation: Compilation | None = None

    @property
    def loss_compiled(self) -> bool:
        """True if the loss is compiled, so that a few kernels read the logits in their own dtype."""
        return self.compilation is not None and self.compilation.fuses and self.compilation.loss

    @cached_property
    def named(self) -> Mapping[str, Placed]:
        """Parameters by all their names."""
        return {n: p for p in self.params for n in p.names}

    @cached_property
    def params_by_stage(self) -> Mapping[int, list[Placed]]:
        """The parameters of each stage that has any, in definition order."""
        return by_stage(self.params)

    @property
    def mixed(self) -> bool:
        """True if the model runs in half precision."""
        return self.dtypes.mixed

    @property
    def split(self) -> bool:
        """True if backwards are split in two: gradients of inputs, then gradients of weights."""
        return len(self.stages) > 1 and RULES[self.scheduler].split

    @property
    def sharded(self) -> bool:
        return any(p.sharded for p in self.params)

    def stage_of(self, module: str) -> int | None:
        """Returns the stage that runs all of ``module``, or ``None`` if it contains glue between stages."""
        if len(self.stages) == 1:
            return 0
        return next((s.index for s in self.stages if any(covers(m, module) for m in s.modules)), None)
