"""``stage_config: auto``: the stages with the shortest step among those that fit in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from launcher.job.schema.job import Job
from launcher.plan.balance.layer_chain import Cut, LayerChain
from launcher.plan.balance.part_memory import (
    BoundaryBytes,
    InFlight,
    PartMemory,
    crossings,
    kept,
    logits_nbytes,
    moments,
    tensor,
)
from launcher.plan.balance.part_times import Parts, PartTimes, predicted, unitless
from launcher.plan.balance.partition import balanced, promising
from launcher.plan.cut import stages
from launcher.plan.cut.stages import Stage
from launcher.plan.cut.tensor_placement import placed
from launcher.plan.cut.traced_model import TracedModel
from launcher.plan.memory.optimizer_state import StateSize
from launcher.plan.refusals import model as model_refusals
from launcher.plan.schedule import schedules
from launcher.plan.schedule.schedules import Schedule
from launcher.plan.schedule.simulate import TopologicalOrder, makespan, order
from launcher.plan.sizes import Sizes
from launcher.plan.tensor_parallel.module_strategies import splits
from launcher.plan.time.speeds import speeds
from launcher.plan.values.module_names import owner
from launcher.plan.values.precision import precision
from launcher.plan.values.text import bytes_text

TRIED = 80_000
"""The approximate number of actions to simulate when cuts are compared; large pipelines get fewer cuts."""
FEWEST, MOST = 8, 400
"""The least and the most cuts to compare."""


@dataclass(frozen=True)
class Balanced:
    """The chosen stages.

    ``cut``: the first part of each stage, then the number of parts. ``text`` explains the choice.
    ``rank_bytes``: about how many bytes each pipeline rank needs. ``step``: how long the schedule takes.
    """

    cut: Cut
    text: str
    rank_bytes: tuple[int, ...]
    step: float


@dataclass(frozen=True)
class _Rows:
    """The values that all cuts of a pipeline share, because they do not depend on costs."""

    order: TopologicalOrder
    ahead: tuple[int, ...]
    moments: tuple[tuple[Mapping[tuple[int, int], InFlight], ...], ...]


def balanced_stages(
    job: Job,
    sizes: Sizes,
    model: TracedModel,
    groups: Sequence[Sequence[str]],
    *,
    optimizer: StateSize,
    room: int | None,
) -> Balanced:
    """Cuts ``groups`` into the stages with the shortest step that fits.

    Args:
        job: the request.
        sizes: the grid and the batch.
        model: the traced model.
        groups: modules in the order of the data; each group is a part, with the glue that is placed with it.
        optimizer: what the optimizer keeps.
        room: bytes of a rank's device; ``None``: unlimited.
    """
    part_of = {m: part for part, group in enumerate(groups) for m in group}
    at, _ = stages.place(model.graph, part_of, len(groups) - 1)
    nodes = [[n.name for n in model.graph.nodes if at[n.name] == part] for part in range(len(groups))]
    crossing = tuple(crossings(g, at, len(groups)) for g in model.graphs)

    pipe = _pipe(job, sizes)
    times = _times(job, sizes, model, nodes, crossing)
    memory = _memory(
        job, sizes, model, at, crossing=crossing, optimizer=optimizer, rows=_schedule_rows(pipe), nodes=nodes
    )
    row = replace(
        _light_row(pipe, times),
        state=memory.state,
        saved=memory.saved,
        flying=memory.flying,
        rank_bytes=memory.peak_bytes,
    )
    choice = balanced(row, room, _likely(pipe, times))
    known = "predicted seconds" if speeds(job) else "flops and bytes written"
    text = f"balanced by {known}{'' if room is None else ' and memory'}"
    text = f"{text}, the slowest rank {_above(times, sizes, choice.cut):.1%} above the mean"
    if room is not None and row.memory(choice.cut) > room:
        text = f"{text}; no split fits in {bytes_text(room)}"
    elif room is not None and choice.cut != choice.fastest:
        text = f"{text}; {_decided(row, choice.cut, choice.fastest, room)}"
    rank_bytes = tuple(row.bytes_of(choice.cut, rank) for rank in range(len(row.ranks)))
    return Balanced(choice.cut, text, rank_bytes, row.step(choice.cut))


def _scheduler(job: Job, sizes: Sizes) -> str:
    """Returns the scheduler to balance stages for; ``auto`` compares schedules only once stages exist."""
    named = job.parallel.pipeline.scheduler
    if named != "auto":
        return named
    return "seqpipe" if sizes.pieces > 1 else "1f1b"


@dataclass(frozen=True)
class _Pipe:
    """Everything that a schedule depends on."""

    scheduler: str
    places: tuple[int, ...]
    chunks: int
    micros: int
    less_memory: bool
    pieces: int


def _pipe(job: Job, sizes: Sizes) -> _Pipe:
    less_memory = job.parallel.pipeline.less_memory
    return _Pipe(_scheduler(job, sizes), sizes.places, sizes.chunks, sizes.micros, less_memory, sizes.pieces)


@lru_cache(maxsize=64)  # a search uses the same few pipelines again and again
def _schedule_rows(pipe: _Pipe) -> _Rows:
    ranks = max(pipe.places) + 1
    schedule = schedules.build(pipe.scheduler, ranks, pipe.chunks, pipe.micros, pipe.less_memory, pipe.pieces)
    ahead = tuple(_ahead(schedule, stage, rank) for stage, rank in enumerate(pipe.places))
    return _Rows(order(schedule, pipe.places, pipe.pieces), ahead, moments(schedule, pipe.pieces))


@lru_cache(maxsize=256)  # layouts that differ only in how states are sharded have the same times
def _likely(pipe: _Pipe, times: PartTimes) -> tuple[Cut, ...]:
    return tuple(promising(_light_row(pipe, times)))


def _light_row(pipe: _Pipe, times: PartTimes) -> LayerChain:
    """Returns the row of parts to cut, without bytes."""
    rows = _schedule_rows(pipe)
    forward, backward = times.each
    return LayerChain(
        forward=forward,
        backward=backward,
        places=pipe.places,
        micros=pipe.micros * pipe.pieces,
        ahead=rows.ahead,
        split=schedules.RULES[pipe.scheduler].split,
        state=(0,) * len(forward),
        saved=(0,) * len(forward),
        flying=(0,) * len(pipe.places),
        step=lambda cut: makespan(rows.order, times.cost(cut)),
        rank_bytes=lambda rank, runs: 0,
        tries=min(MOST, max(FEWEST, TRIED // len(rows.order.steps))),
    )


def _ahead(schedule: Schedule, stage: int, rank: int) -> int:
    """Returns the number of forwards of a stage before its first backward."""
    kinds = [a.kind for a in schedule[rank] if a.stage == stage]
    return next((i for i, kind in enumerate(kinds) if kind != "F"), len(kinds))


def _times(
    job: Job, sizes: Sizes, model: TracedModel, nodes: Parts, crossing: Sequence[Sequence[BoundaryBytes]]
) -> PartTimes:
    sent = tuple(sum(c.nbytes for c in part) for part in zip(*crossing, strict=True))
    fast = speeds(job)
    if fast is None:
        return unitless(model.graphs, nodes, sent)
    return predicted(
        model.graphs,
        nodes,
        sent,
        spreads=model.operators.spreads,
        grid=sizes.grid,
        places=sizes.places,
        speeds=fast,
    )


def _memory(
    job: Job,
    sizes: Sizes,
    model: TracedModel,
    at: Mapping[str, int],
    *,
    crossing: tuple[tuple[BoundaryBytes, ...], ...],
    optimizer: StateSize,
    rows: _Rows,
    nodes: Parts,
) -> PartMemory:
    """Returns the memory of the parts.

    All tensors are first placed on one stage, which gives their layout on a rank, and then assigned to the
    parts that use them.
    """
    par, dtypes = job.parallel, precision(job)
    names = tuple(p.name for p in model.skeleton.params)
    one_stage = Stage(0, (), (), (), (), names, 0, 0)
    over_tp = splits([s.operator for s in model.operators.spreads])
    apart = model_refusals.changed_tensors(model.graph, sizes)
    every = placed(
        model.skeleton, (one_stage,), sizes, par.hsdp, splits=over_tp, low=dtypes.low, unsharded=apart
    )
    level = par.hsdp.optimizer_level if par.hsdp else None

    users = _users(model, at)
    used = ((p, frozenset[int]().union(*(users[n] for n in p.names))) for p in every)
    layouts = {p.layout for p in every}
    local_shapes = {layout: box.shape for layout in layouts if (box := layout.box(0)) is not None}
    return PartMemory(
        tensors=tuple(
            tensor(p, local_shapes[p.layout], parts, optimizer.nbytes(p, local_shapes[p.layout]), level)
            for p, parts in used
            if parts
        ),
        kept=tuple(tuple(kept([g[n] for n in part]) for part in nodes) for g in model.graphs),
        crossings=crossing,
        logits=logits_nbytes(model.graphs[-1]),
        places=sizes.places,
        moments=rows.moments,
        micros=sizes.micros,
        keeps_messages=model.keeps_messages,
    )


def _users(model: TracedModel, at: Mapping[str, int]) -> dict[str, frozenset[int]]:
    """Returns the parts that use each parameter: they call a module that contains it, or glue takes it."""
    called: dict[str, set[int]] = {}
    direct: dict[str, set[int]] = {}
    for n in model.graph.nodes:
        if n.kind == "module":
            called.setdefault(n.target, set()).add(at[n.name])
        for m in n.inputs:
            if model.graph[m].kind == "param":
                direct.setdefault(model.graph[m].target, set()).add(at[n.name])
    out = {}
    for p in model.skeleton.params:
        around = (called.get(module, set()) for module in stages.around(owner(p.name)))
        out[p.name] = frozenset(direct.get(p.name, set()).union(*around))
    return out


def _above(times: PartTimes, sizes: Sizes, cut: Cut) -> float:
    """Returns the fraction by which the work of the slowest rank exceeds the mean."""
    cost = times.cost(cut)
    loads = [0.0] * sizes.grid["pp"]
    for i, time in enumerate(f + b for f, b in zip(cost.forward, cost.backward, strict=True)):
        loads[sizes.places[i // sizes.pieces]] += time
    return max(loads) * len(loads) / (sum(loads) or 1.0) - 1


def _decided(row: LayerChain, cut: Cut, fastest: Cut, room: int) -> str:
    """Returns as text how the memory limit has changed the cut."""
    needed = f"{bytes_text(row.memory(fastest))} of {bytes_text(room)}"
    longer = row.step(cut) / row.step(fastest) - 1
    return f"chosen for memory: the fastest stages are {longer:.1%} faster, but need {needed}"
