"""Each stage of a plan as a load of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from launcher.job.schema.parallel import Hsdp
from launcher.plan.cost.fusion import Bucket, Group
from launcher.plan.cost.peak import Gather, Load, Moment, Pass, fullest
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.partition.stage_config import owner
from launcher.plan.partition.stages import Crossing, Stage, covers, segments
from launcher.plan.schedule.actions import Schedule
from launcher.plan.values.facts import ITEMSIZE, WIDTH, Graph, TensorSpec
from launcher.plan.values.precision import Precision


@dataclass(frozen=True)
class Cut:
    """A model, cut. ``graphs``: of whole micro batches, or one a piece; ``boundaries[s]``: what leaves stage s."""

    stages: tuple[Stage, ...]
    graphs: tuple[Graph, ...]
    boundaries: tuple[tuple[Crossing, ...], ...]
    params: tuple[Placed, ...]
    groups: tuple[Group, ...]
    sizes: Sizes
    dtypes: Precision


def full(schedule: Schedule, cut: Cut, hsdp: Hsdp | None, buckets: tuple[Bucket, ...]) -> tuple[Moment, ...]:
    """The fullest moment of each pipeline rank."""
    places, level = cut.sizes.places, hsdp.optimizer_level if hsdp else "level1"
    most = [max((b.nbytes for b in buckets if places[b.stage] == pp), default=0) for pp in range(len(schedule))]
    return tuple(
        fullest(row, loads(cut, pp), level == "level3", level != "level1", most[pp]) for pp, row in enumerate(schedule)
    )


def loads(cut: Cut, pp: int) -> dict[int, Load]:
    """Of the stages of pipeline rank ``pp``."""
    here = cut.sizes.held(pp)
    return {s: _load(cut, cut.stages[s], here) for s in here}


def _load(cut: Cut, stage: Stage, here: tuple[int, ...]) -> Load:
    """``here``: all stages of its rank."""
    sizes = cut.sizes
    whole = [p for p in cut.params if not p.sharded and p.trainable and stage.index in p.copies(here)]
    passes = tuple(_pass(stage, cut.stages, g, cut.graphs[0], sizes.places) for g in cut.graphs)
    named = [s.module for s in passes[0].segments]
    gathered = [g for g in cut.groups if g.stage == stage.index]
    return Load(
        passes=passes,
        gathers=tuple(_gather(g, named, cut.params, sizes, cut.dtypes) for g in gathered),
        own=_own(whole, stage, named),
        stand_ins=sum(p.gathered for p in whole if p.compute != p.spec.dtype),
        buffers=sizes.micros * _received(stage.index, sizes, cut.boundaries),
    )


def _pass(stage: Stage, cut: tuple[Stage, ...], graph: Graph, first: Graph, places: tuple[int, ...]) -> Pass:
    s, last = stage.index, stage.index == len(cut) - 1
    away, far = not last and places[s + 1] != places[s], s > 0 and places[s - 1] != places[s]
    names = (graph.nodes[-1].name,) if last else stage.sends
    made = [t for n in names for t in graph[n].out or ()]
    took = [t for n in cut[s - 1].sends for t in graph[n].out or ()] if far else []
    return Pass(
        segments=segments(stage, graph, first),
        out=0 if away else sum(t.nbytes for t in made),
        loss=sum(_wide(t) for t in made[:1]) if last else 0,
        sent=sum(t.nbytes for t in made) if away else 0,
        returned=sum(t.nbytes for t in took if "float" in t.dtype),
    )


def _specs(crossing: Sequence[Crossing]) -> list[TensorSpec]:
    return [t for c in crossing for t in c.specs]


def _wide(t: TensorSpec) -> int:
    """The loss is worked out in float32 at least."""
    return prod(t.shape) * max(4, WIDTH[t.dtype])


def _received(s: int, sizes: Sizes, boundaries: tuple[tuple[Crossing, ...], ...]) -> int:
    """Bytes that one micro batch brings from other ranks: values from before, gradients from after."""
    place, out = sizes.places, 0
    if s and place[s - 1] != place[s]:
        out += sum(t.nbytes for t in _specs(boundaries[s - 1]))
    if s < len(place) - 1 and place[s + 1] != place[s]:
        out += sum(t.nbytes for t in _specs(boundaries[s]) if "float" in t.dtype)
    return out


def _gather(g: Group, segments: list[str], params: tuple[Placed, ...], sizes: Sizes, dtypes: Precision) -> Gather:
    named = {n: p for p in params for n in p.names}
    held, shard = [named[n] for n in g.names], sizes.grid["dp_shard"]
    trained = [named[n] for n in g.names if n not in g.idle]
    near = [i for i, s in enumerate(segments) if any(_meet(m, s) for m in g.modules)]
    reduced = {p.name: ITEMSIZE[dtypes.reduce if dtypes.mixed else p.spec.dtype] for p in trained}
    return Gather(
        whole=sum(p.padded * ITEMSIZE[p.compute] for p in held),
        grads=sum(p.gathered for p in trained),
        scattered=sum(p.padded * reduced[p.name] for p in trained),
        shard=sum(p.padded // shard * ITEMSIZE[p.spec.dtype] for p in trained),
        first=min(near, default=0),
        last=max(near, default=len(segments) - 1),
    )


def _meet(group: str, segment: str) -> bool:
    """Whether the one runs inside the other."""
    return covers(group, segment) or (bool(segment) and covers(segment, group))


def _own(whole: list[Placed], stage: Stage, segments: list[str]) -> tuple[int, ...]:
    """Bytes of the gradients of whole parameters, by the first segment that has them; the rest comes last."""
    out = [0] * max(1, len(segments))
    for p in whole:
        here = next(n for n in p.names if n in stage.params)
        near = [i for i, s in enumerate(segments) if s and covers(s, owner(here))]
        out[min(near, default=0)] += p.nbytes
    return tuple(out)
