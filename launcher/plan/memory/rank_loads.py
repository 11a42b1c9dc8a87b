"""The plan as loads of each rank, for the memory walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from launcher.plan.communication.buckets_and_gathers import Bucket, GatherGroup
from launcher.plan.cut.stages import BoundaryTensor, Stage, around, covers, segments
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.cut_model import CutModel
from launcher.plan.memory.walk import (
    ActionMemory,
    FsdpPolicy,
    Gather,
    MemoryInUse,
    PassBytes,
    StageLoad,
    fullest,
    levels,
)
from launcher.plan.schedule.schedules import Row
from launcher.plan.values.dtypes import ITEMSIZE, WIDTH
from launcher.plan.values.model_graph import Graph
from launcher.plan.values.module_names import owner
from launcher.plan.values.tensor_spec import TensorSpec


@dataclass(frozen=True)
class RankLoad:
    """A pipeline rank: its stages, its actions (``row``) and its FSDP2 policy, as ``fullest`` takes them."""

    row: Row
    stages: tuple[tuple[int, StageLoad], ...]
    policy: FsdpPolicy

    @property
    def fullest(self) -> MemoryInUse:
        return fullest(self.row, dict(self.stages), self.policy)

    @property
    def levels(self) -> tuple[ActionMemory, ...]:
        return tuple(levels(self.row, dict(self.stages), self.policy))


def rank_loads(model: CutModel, buckets: tuple[Bucket, ...], early: bool) -> tuple[RankLoad, ...]:
    """Returns one load per pipeline rank; ``early``: level1 reduces during its last backward."""
    places = model.sizes.places
    level = model.hsdp.optimizer_level if model.hsdp else "level1"
    out = []
    for pp, row in enumerate(model.schedule):
        here = model.sizes.stages_of(pp)
        stages = tuple((s, _load(model, model.stages[s], here)) for s in here)
        largest = max((b.nbytes for b in buckets if places[b.stage] == pp), default=0)
        policy = FsdpPolicy(
            regathers=level == "level3",
            reduces_each_backward=level != "level1",
            scatters_early=early,
            copied=largest,
        )
        out.append(RankLoad(row, stages, policy))
    return tuple(out)


def _load(model: CutModel, stage: Stage, here: tuple[int, ...]) -> StageLoad:
    """Returns the load of ``stage``; ``here``: all stages of its rank."""
    params = model.params_by_stage.get(stage.index, [])
    unsharded = [p for p in params if not p.sharded and p.trainable and stage.index in p.copies(here)]
    passes = tuple(_pass(model, stage, graph) for graph in model.graphs)
    named = [s.module for s in passes[0].segments]
    gathered = [g for g in model.groups if g.stage == stage.index]
    sent = stage_messages(model.boundaries, model.sizes.places, stage.index)
    return StageLoad(
        passes=passes,
        gathers=tuple(_gather(model, g, named) for g in gathered),
        own=_own(unsharded, stage, named),
        half_copies=sum(p.gathered for p in unsharded if p.compute != p.spec.dtype),
        buffers=model.sizes.micros * sent.received if model.keeps_messages else 0,
    )


def _pass(model: CutModel, stage: Stage, graph: Graph) -> PassBytes:
    """Returns the bytes of one forward of ``stage`` and its backward; ``graph``: of one piece."""
    s, places = stage.index, model.sizes.places
    last = s == len(model.stages) - 1

    # the stage's output: handed on within the rank, sent to another rank, or used by the loss
    names = (graph.nodes[-1].name,) if last else stage.sends
    made = [t for n in names for t in graph[n].out or ()]
    nbytes = sum(t.nbytes for t in made)
    away = not last and places[s + 1] != places[s]

    # for inputs from another rank it sends gradients back
    far = s > 0 and places[s - 1] != places[s]
    took = [t for n in model.stages[s - 1].sends for t in graph[n].out or ()] if far else []
    one = PassBytes(
        segments=segments(stage, graph, model.graphs[0]),
        out=0 if away else nbytes,
        loss=sum(t.nbytes if model.loss_compiled else _wide(t) for t in made[:1]) if last else 0,
        sent=nbytes if away else 0,
        returned=_floats(took),
    )
    if model.keeps_messages:
        return one
    answer = _floats(made) if away else 0
    return replace(one, out=nbytes, sent=0, received=sum(t.nbytes for t in took), answer=answer)


def _floats(specs: Sequence[TensorSpec]) -> int:
    """Returns the bytes of the gradients of these tensors."""
    return sum(t.nbytes for t in specs if "float" in t.dtype)


def _wide(t: TensorSpec) -> int:
    """Returns the bytes of ``t`` in the loss, which is computed in float32 at least."""
    return prod(t.shape) * max(4, WIDTH[t.dtype])


@dataclass(frozen=True)
class StageMessages:
    """The bytes of a micro batch that a stage exchanges with other ranks.

    A stage ``takes`` inputs and ``gives`` outputs; ``answer`` are the gradients of its outputs. Torch may
    receive into buffers for all micro batches, and keep sent tensors until the end of the step.
    """

    takes: int
    gives: int
    answer: int

    @property
    def received(self) -> int:
        return self.takes + self.answer


def stage_messages(
    boundaries: Sequence[tuple[BoundaryTensor, ...]], places: Sequence[int], s: int
) -> StageMessages:
    """Returns the messages of stage ``s``; ``places``: the pipeline rank of each stage."""
    far = s > 0 and places[s - 1] != places[s]
    away = s < len(places) - 1 and places[s + 1] != places[s]
    inputs = [t for c in boundaries[s - 1] for t in c.specs] if far else []
    outputs = [t for c in boundaries[s] for t in c.specs] if away else []
    return StageMessages(
        takes=sum(t.nbytes for t in inputs),
        gives=sum(t.nbytes for t in outputs),
        answer=_floats(outputs),
    )


def _gather(model: CutModel, g: GatherGroup, segments: list[str]) -> Gather:
    params = [model.named[n] for n in g.names]
    trained = [model.named[n] for n in g.names if n not in g.idle]
    shard = model.sizes.grid["dp_shard"]
    reduced = model.dtypes.reduce if model.dtypes.mixed else None

    # the segments that run with these weights
    near = [i for i, s in enumerate(segments) if any(_meet(m, s) for m in g.modules)]
    return Gather(
        full_weights=sum(p.padded * ITEMSIZE[p.compute] for p in params),
        grads=sum(p.gathered for p in trained),
        scattered=sum(p.padded * ITEMSIZE[reduced or p.spec.dtype] for p in trained),
        shard=sum(p.padded // shard * ITEMSIZE[p.spec.dtype] for p in trained),
        first=min(near, default=0),
        last=max(near, default=len(segments) - 1),
    )


def _meet(group: str, segment: str) -> bool:
    """Returns true if one of the two modules runs inside the other."""
    return covers(group, segment) or (bool(segment) and covers(segment, group))


def _own(unsharded: list[Placed], stage: Stage, segments: list[str]) -> tuple[int, ...]:
    """Returns the bytes of the gradients of unsharded parameters, by the first segment that contains them.

    Parameters of no segment count in the first one, whose backward runs last.
    """
    out = [0] * max(1, len(segments))
    names = frozenset(stage.params)
    first = {s: i for i, s in reversed([*enumerate(segments)]) if s}
    for p in unsharded:
        here = next(n for n in p.names if n in names)
        near = [first[m] for m in around(owner(here)) if m in first]
        out[min(near, default=0)] += p.nbytes
    return tuple(out)
