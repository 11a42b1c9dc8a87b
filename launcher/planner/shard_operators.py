"""Cuts the operators of a planned model over the device matrices of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.sharding.onto_plan import onto
from launcher.plan.sharding.rules import rule_of
from launcher.plan.sharding.stage_sharding import StageGraphs, resolve
from launcher.plan.values.facts import TensorSpec

if TYPE_CHECKING:
    from torch import nn


def shard_operators(job: Job, made: Plan, model: nn.Module, specs: Sequence[TensorSpec]) -> Plan:
    """``made`` with the strategies of ``job``; ``model`` (on meta) is whole. Raises ``RequestError``."""
    graphs = _graphs(made, model, specs)
    return onto(job, made, resolve(job, graphs, rule_of, made.sizes.grid["tp"]))


def _graphs(made: Plan, model: nn.Module, specs: Sequence[TensorSpec]) -> list[StageGraphs]:
    """What each virtual stage runs."""
    from launcher.parallel.dispatch.modes import evaluating
    from launcher.parallel.model_state.deep_copy import copied
    from launcher.parallel.sharding.record import record
    from launcher.parallel.stages.split import split, traced
    from launcher.parallel.trace.model_facts import meta

    model = copied(model)
    tracer = traced(model, made, tuple(specs))
    out = []
    for stage in made.stages:
        parts = split(copied(model), made, made.sizes.places[stage.index], tracer)
        (module,) = (p.module for p in parts if p.stage.index == stage.index)
        given = list(meta(specs))
        if stage.index:
            crossings = made.boundaries[stage.index - 1]
            given = [t for c in crossings for t in meta(c.specs)]
            trains = [c.trains for c in crossings for _ in c.specs]
            given = [t.requires_grad_(g) for t, g in zip(given, trains, strict=True)]
        train = record(module, given)
        with evaluating([module]):
            other = record(module, given)
        out.append(StageGraphs(train, train if other == train else other))
    return out
