"""Builds the plan over device matrices: layouts of parameters, what stages send, and costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.errors import refuse
from launcher.job.schema.job import Job
from launcher.plan.cost.memory import StateSize
from launcher.plan.partition.params import Placed
from launcher.plan.partition.stages import Crossing
from launcher.plan.plan import Plan
from launcher.plan.settings import transformer_opt
from launcher.plan.settings.hsdp import LEVEL, LEVELS
from launcher.plan.sharding.parameters import global_layout
from launcher.plan.sharding.show_sharding import gathered
from launcher.plan.sharding.stage_sharding import Sharding, StageSharding
from launcher.plan.sharding.step_memory import StageBytes, sharded_memory
from launcher.plan.sharding.traffic import sharded_traffic
from launcher.plan.values.setting import Setting
from launcher.plan.values.text import many


def onto(job: Job, made: Plan, sharding: Sharding, measured: Sequence[StageBytes]) -> Plan:
    """``made``, whose tensors are all on every rank of a stage, sharded as ``sharding`` says.

    ``measured``: the bytes that each virtual stage keeps. Raises ``RequestError`` for operators on gathered
    tensors if ``strict`` forbids them.
    """
    refuse(transformer_opt.gathered(job, map(str, gathered(sharding))))
    params = tuple(_placed(p, made, sharding) for p in made.params)
    boundaries = tuple(
        tuple(_crossings(crossings, stage))
        for crossings, stage in zip(made.boundaries, sharding.stages, strict=True)
    )
    settings = (*made.settings, *_hsdp(job, sharding))
    traffic = sharded_traffic(
        sharding,
        made.sizes,
        made.schedule,
        boundaries,
        params=params,
        ties=made.ties,
        regathered=[m.regathered for m in measured],
    )
    memory = sharded_memory(
        measured,
        boundaries,
        made.schedule,
        made.sizes,
        params=params,
        state=StateSize.of(job, made.observed.optimizer),
    )
    return replace(
        made,
        params=params,
        boundaries=boundaries,
        sharding=sharding,
        settings=settings,
        estimate=replace(made.estimate, traffic=traffic, memory=memory, step=None),
    )


def _hsdp(job: Job, sharding: Sharding) -> Iterator[Setting]:
    """What the optimizer level amounts to: each parameter is sharded over its own replicas."""
    hsdp = job.parallel.hsdp
    if hsdp is None:
        return
    level = hsdp.optimizer_level
    shared = [p for p in sharding.params.values() if p.shared]
    if shared:
        text = f"{LEVELS[level]}; {many(len(shared), 'parameter')} over the ranks that repeat them"
        yield Setting(LEVEL, level, "applied", text)
    else:
        text = "no parameter is sharded: none is repeated, large enough and divisible"
        yield Setting(LEVEL, level, "degraded", text)


def _placed(p: Placed, made: Plan, sharding: Sharding) -> Placed:
    found = sharding.params.get(p.name)
    if found is None:
        return p
    places = dict(p.layout.at)["pp"]
    return replace(p, layout=global_layout(found.rest, p.spec, made.sizes.grid["pp"], places))


def _crossings(crossings: tuple[Crossing, ...], stage: StageSharding) -> Iterator[Crossing]:
    """The shards of each boundary tensor that a rank sends."""
    parts = iter(stage.gives)
    for c in crossings:
        yield replace(c, specs=tuple(next(parts) for _ in c.specs))
