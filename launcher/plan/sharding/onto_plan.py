"""A plan whose operators are cut over device matrices: layouts of parameters, what stages send, and costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.job.schema.job import Job
from launcher.plan.partition.params import Placed
from launcher.plan.partition.stages import Crossing
from launcher.plan.plan import Plan
from launcher.plan.sharding.parameters import global_layout
from launcher.plan.sharding.stage_sharding import Sharding, StageSharding


def onto(job: Job, made: Plan, sharding: Sharding) -> Plan:
    """``made``, which has every tensor whole on all ranks of a stage, with what ``sharding`` cuts."""
    params = tuple(_placed(p, made, sharding) for p in made.params)
    boundaries = tuple(
        tuple(_crossings(crossings, stage))
        for crossings, stage in zip(made.boundaries, sharding.stages, strict=True)
    )
    return replace(made, params=params, boundaries=boundaries, sharding=sharding)


def _placed(p: Placed, made: Plan, sharding: Sharding) -> Placed:
    found = sharding.params.get(p.name)
    if found is None:
        return p
    places = dict(p.layout.at)["pp"]
    return replace(p, layout=global_layout(found.rest, p.spec, made.sizes.grid["pp"], places))


def _crossings(crossings: tuple[Crossing, ...], stage: StageSharding) -> Iterator[Crossing]:
    """What a rank sends of each."""
    parts = iter(stage.gives)
    for c in crossings:
        yield replace(c, specs=tuple(next(parts) for _ in c.specs))
