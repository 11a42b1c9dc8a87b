"""Plans a request with ``recompute: auto``: tries choices of blocks until the plan of one fits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from launcher.errors import RequestError
from launcher.job.schema.components import foreign
from launcher.job.schema.job import Job
from launcher.plan.cut import uncut_modules
from launcher.plan.lighter_layouts import lighter
from launcher.plan.memory.fits_cluster import tightest
from launcher.plan.plan import Plan
from launcher.plan.recompute_auto import (
    NONE,
    POLICIES,
    Trials,
    blocks,
    note,
    stage_of_modules,
    too_little,
    with_policies,
)
from launcher.plan.values.model_graph import Graph
from launcher.plan.values.precision import DTYPE
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import GB
from launcher.planner.trace_model import ModelRead

TRIES = 4
"""The most attempts. A plan may need more memory than its blocks predict: the excess widens the margin."""


class Planned(Protocol):
    """Plans a request; modules keep the stages of ``like`` where the request leaves them open."""

    def __call__(self, job: Job, like: dict[str, int] | None = None) -> Plan: ...


def solved(job: Job, planned: Planned) -> Plan:
    """Returns the plan of ``job`` with as few recomputed blocks as fit in memory.

    ``planned`` plans without auto. Raises ``RequestError`` if no choice fits.
    """
    room = _room(job)
    plain = planned(with_policies(job, {}))
    if tightest(plain.estimate.memory, room).fits:
        return _noted(plain, blocks(plain), room)

    planned, plain = _same_stages(job, planned)
    trials = _trials(job, planned, plain, room)
    made = list(trials.plans.values())
    for _ in range(TRIES):
        choice = trials.choice()
        if choice is None:
            break
        made.append(planned(with_policies(job, choice)))
        fullest = tightest(made[-1].estimate.memory, room)
        if fullest.fits:
            return _noted(made[-1], trials.blocks, room, exact=trials.exact)
        trials = replace(trials, margin=trials.margin + fullest.needed - room)
    raise RequestError((too_little(made, room, _cure(job, plain, planned, room)),))


def _same_stages(job: Job, planned: Planned) -> tuple[Planned, Plan]:
    """Returns ``planned`` with the stages of the fastest step fixed, and its plan without recomputation.

    The stages do not depend on memory: blocks are recomputed to save it.
    """
    ample = job.model_copy(update={"cluster": job.cluster.model_copy(update={"memory_gb": None})})
    like = stage_of_modules(planned(with_policies(ample, {})))
    stay = partial(planned, like=like)
    return stay, stay(with_policies(job, {}))


def _room(job: Job) -> int:
    assert job.cluster.memory_gb is not None
    return int(job.cluster.memory_gb * GB)


def _noted(plan: Plan, blocks: tuple[str, ...], room: int, *, exact: bool = True) -> Plan:
    return replace(plan, notes=(*plan.notes, note(plan, blocks, room, exact=exact)))


def _trials(job: Job, planned: Planned, plain: Plan, room: int) -> Trials:
    """Returns one plan per policy, with all blocks that can be recomputed."""
    names = blocks(plain)
    while names:
        try:
            plans = {p: planned(with_policies(job, dict.fromkeys(names, p))) for p in POLICIES if p != NONE}
            return Trials({NONE: plain} | plans, names, room)
        except RequestError as error:
            texts = [problem.text for problem in error.problems]
            able = tuple(n for n in names if not any(t.startswith(f"{n} cannot run again") for t in texts))
            if able == names:
                raise
            names = able
    return Trials({NONE: plain}, (), room)


def _cure(job: Job, plain: Plan, planned: Planned, room: int) -> str:
    """Returns the first lighter layout that fits if all of its blocks are recomputed."""
    for change in lighter(job, plain):
        try:
            stay, light = _same_stages(change.applied_to(job), planned)
            full = stay(with_policies(change.applied_to(job), dict.fromkeys(blocks(light), "full")))
        except RequestError:  # not valid for this model or with other settings
            continue
        if tightest(full.estimate.memory, room).fits:
            return change.words
    return ""


def drawn_graph(
    job: Job, model: ModelRead, uncut: Sequence[str] | None, specs: tuple[TensorSpec, ...], graph: Graph
) -> Graph | None:
    """Returns the graph to show, or ``None`` if none is requested.

    ``graph`` was traced between the modules ``uncut``. A model that runs unchanged as one stage is traced
    once more, between the modules that stages would have; if that fails, ``graph`` shows the order in which
    they ran.
    """
    if not job.debug.graphs:
        return None
    if uncut is not None:
        return graph

    from launcher.parallel.dispatch.modes import default_dtype
    from launcher.parallel.model_state.references import leaving, unmarked
    from launcher.parallel.trace import build_graph, tensor_specs

    units = frozenset(uncut_modules.units(model.skeleton))
    dtype = tensor_specs.dtype_of(DTYPE[job.train.precision])
    try:
        with default_dtype(dtype), unmarked(model.marks), leaving(model.module):
            return build_graph.graph(model.module, units, specs, ours=not foreign(job.model))
    except RequestError:
        return graph
