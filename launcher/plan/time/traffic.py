"""Collectives of a step: how many, and how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from launcher.plan.communication.buckets_and_gathers import Bucket, Communication, GatherGroup
from launcher.plan.cut.stages import BoundaryTensor
from launcher.plan.cut.tensor_placement import Placed, Tie
from launcher.plan.cut_model import CutModel
from launcher.plan.schedule.schedules import Row
from launcher.plan.sizes import Sizes
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.precision import Precision


def reduced(p: Placed, dtypes: Precision) -> int:
    """Returns the bytes of one element of the gradient of ``p`` while it is sent."""
    return ITEMSIZE[dtypes.reduce if dtypes.mixed else p.spec.dtype]


def scatters(model: CutModel, limit: int | None) -> tuple[Bucket, ...]:
    """Returns the buckets of each stage in turn; bytes are those of the full, padded gradients.

    ``limit``: bytes of a bucket; ``None``: what was gathered together. Empty at other levels than level1.
    """
    if model.hsdp is None or model.hsdp.optimizer_level != "level1":
        return ()
    return tuple(b for s in range(len(model.stages)) for b in _of_stage(model, s, limit))


def _of_stage(model: CutModel, stage: int, limit: int | None) -> Iterator[Bucket]:
    """Yields the buckets of one stage.

    A group that fits ``limit`` is not divided: a bucket waits for all of its groups.
    """
    together, nbytes = list[Placed](), 0
    for group in _done(model, stage):
        sizes = {p: p.padded * reduced(p, model.dtypes) for p in _learning(model, group)}
        pieces = [list(sizes)] if limit is None or sum(sizes.values()) <= limit else [[p] for p in sizes]
        for piece in filter(None, pieces):
            size = sum(sizes[p] for p in piece)
            other = bool(together) and together[-1].spec.dtype != piece[0].spec.dtype
            if together and (limit is None or other or nbytes + size > limit):
                yield Bucket(stage, tuple(p.name for p in together), nbytes)
                together, nbytes = [], 0
            together += piece
            nbytes += size
    if together:
        yield Bucket(stage, tuple(p.name for p in together), nbytes)


def _learning(model: CutModel, group: GatherGroup) -> list[Placed]:
    return [model.named[n] for n in group.names if n not in group.idle]


def _done(model: CutModel, stage: int) -> list[GatherGroup]:
    """Returns the groups as their gradients are ready: autograd reverses the order of the forward."""
    first = {v.group: n for n, v in reversed([*enumerate(model.visits[stage])]) if v.begins}
    back = sorted(first, key=lambda i: -first[i])
    rest = [i for i, g in enumerate(model.groups) if g.stage == stage and i not in first]
    return [model.groups[i] for i in (*back, *rest)]


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "receive")
Event = tuple[str, int]
"""A kind and the bytes of the full tensor: the output of a gather, the input of a reduce-scatter."""


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind that ``rank`` joins in a training step; ``nbytes`` is their sum."""

    rank: int
    kind: str
    count: int
    nbytes: int


def traffic(model: CutModel, fused: Communication) -> tuple[Traffic, ...]:
    """Returns the traffic of each rank in turn, in the order of ``KINDS``, without kinds that do not occur.

    Collectives inside modules, which are those of tensor parallelism, are not included.
    """
    named = model.named
    out: dict[int, list[Traffic]] = {}
    cuts = sorted({axis for tie in model.ties for axis in named[tie.name].layout.axes})
    for pp in range(model.sizes.grid["pp"]):
        sent = between_stages(model.boundaries, model.schedule[pp], model.sizes.places, pp, model.lengths)
        same = [*between_replicas(model, fused, named, pp), *sent, *scalars(model.sizes, pp)]

        # ranks of a stage have different shards of tied parameters
        for ranks in model.sizes.grid.alike(*cuts, pp=pp):
            tied = between_copies(model.ties, named, model.sizes, ranks[0])
            sums = list(added_up(ranks[0], [*same, *tied]))
            out |= {rank: [replace(t, rank=rank) for t in sums] for rank in ranks}
    return tuple(t for rank in sorted(out) for t in out[rank])


def messages(sent: tuple[Traffic, ...], sizes: Sizes) -> int:
    """Returns the number of tensors that the ranks of one pipeline send each other in a step."""
    pipeline = sizes.grid.peers(0, "pp")
    return sum(t.count for t in sent if t.kind == "send" and t.rank in pipeline)


def added_up(rank: int, events: list[Event]) -> Iterator[Traffic]:
    """Yields the sum of ``events`` by kind, in the order of ``KINDS``."""
    count: Counter[str] = Counter(kind for kind, _ in events)
    for kind in KINDS:
        if count[kind]:
            yield Traffic(rank, kind, count[kind], sum(n for k, n in events if k == kind))


def between_replicas(
    model: CutModel, fused: Communication, named: Mapping[str, Placed], pp: int
) -> Iterator[Event]:
    """Yields what the data-parallel ranks of a stage exchange: weights, gradients, and buffers."""
    place = model.sizes.places
    groups = [g for g in model.groups if place[g.stage] == pp] if model.hsdp else []
    for group in groups:
        yield from _group(model, group, named)
    trained = sum(len(g.names) - len(g.idle) for g in groups)
    if trained:
        yield "all_reduce", trained  # one byte per parameter: whether any rank has a gradient for it
    for bucket in fused.scatters:
        if place[bucket.stage] == pp:
            yield from _scattered(model.sizes, bucket.nbytes, 1)
    for bucket in fused.sums:
        if place[bucket.stage] == pp:
            yield "all_reduce", bucket.nbytes + _flags(bucket, named, model.dtypes)
    yield from _statistics(model.params, model.sizes, pp)


def scalars(sizes: Sizes, pp: int) -> Iterator[Event]:
    """Yields the all-reduces of single numbers in each step."""
    yield "all_reduce", 24  # the loss, the gradient norm, and whether any rank should stop
    if sizes.places[-1] == pp and sizes.replicas > 1:
        yield "all_reduce", 8  # the number of targets that count


def _group(model: CutModel, group: GatherGroup, named: Mapping[str, Placed]) -> Iterator[Event]:
    """Yields the collectives of one group.

    level3 gathers for each forward and each backward, level1 and level2 once. level1 scatters in buckets,
    which are not counted here.
    """
    assert model.hsdp is not None
    sizes, level = model.sizes, model.hsdp.optimizer_level
    micros = sizes.micros * sizes.pieces

    gathered = sum(named[n].padded * ITEMSIZE[named[n].compute] for n in group.names)
    again = micros * group.calls * (1 + group.backward) if level == "level3" else 1
    yield from [("all_gather", gathered)] * again

    trained = [named[n] for n in group.names if n not in group.idle]
    if trained and level != "level1":
        yield from _scattered(sizes, sum(p.padded * reduced(p, model.dtypes) for p in trained), micros)


def _scattered(sizes: Sizes, nbytes: int, times: int) -> Iterator[Event]:
    """Yields ``times`` reduce-scatters, and one all-reduce of their sum over replicas."""
    yield from [("reduce_scatter", nbytes)] * times
    if sizes.grid["dp_replicate"] > 1:
        yield "all_reduce", nbytes // sizes.grid["dp_shard"]


def _flags(b: Bucket, named: Mapping[str, Placed], dtypes: Precision) -> int:
    """Returns the bytes of the flags in a bucket: one number per parameter says whether it has a gradient."""
    return sum(reduced(named[n], dtypes) for n in b.names)


def _statistics(params: tuple[Placed, ...], sizes: Sizes, pp: int) -> Iterator[Event]:
    """Yields one broadcast per dtype of buffers, from the first data-parallel rank to the others."""
    if sizes.replicas == 1:
        return
    nbytes: dict[str, int] = {}
    for p in params:
        here = sum(sizes.places[s] == pp for s in p.stages)
        if p.buffer and here:
            nbytes[p.spec.dtype] = nbytes.get(p.spec.dtype, 0) + p.spec.nbytes * here
    for dtype in sorted(nbytes):
        yield "broadcast", nbytes[dtype]


def between_stages(
    boundaries: Sequence[tuple[BoundaryTensor, ...]],
    row: Row,
    places: Sequence[int],
    pp: int,
    pieces: Sequence[int] = (),
) -> Iterator[Event]:
    """Yields what a pipeline rank sends and receives: values forward, gradients of floating values back.

    Nothing is sent between stages of one rank.
    """
    for action in row:
        if action.kind == "W":
            continue
        forward, stage = action.kind == "F", action.stage
        before, after = ("receive", "send") if forward else ("send", "receive")
        part = (pieces[action.micro % len(pieces)], sum(pieces)) if pieces else (1, 1)
        if stage > 0 and places[stage - 1] != pp:
            yield from ((before, n) for n in _specs(boundaries[stage - 1], forward, *part))
        if stage < len(places) - 1 and places[stage + 1] != pp:
            yield from ((after, n) for n in _specs(boundaries[stage], forward, *part))


def _specs(crossing: tuple[BoundaryTensor, ...], forward: bool, length: int, full_length: int) -> list[int]:
    """Returns the bytes of each tensor for ``length`` of ``full_length`` positions."""
    sent = ((t, grad) for c in crossing for t, grad in zip(c.specs, c.gradients, strict=True))
    return [t.nbytes * length // full_length for t, grad in sent if forward or grad]


def between_copies(
    ties: Sequence[Tie], named: Mapping[str, Placed], sizes: Sizes, rank: int
) -> Iterator[Event]:
    """Yields the all-reduces of tied gradients: one per dtype and set of pipeline ranks that share them."""
    counts: Counter[tuple[tuple[int, ...], str]] = Counter()
    pp = sizes.grid.coords(rank)["pp"]
    for tie in ties:
        at = tuple(sorted({sizes.places[s] for s in tie.stages}))
        box = named[tie.name].layout.box(rank)
        if tie.trained and pp in at and len(at) > 1 and box is not None:
            dtype = named[tie.name].spec.dtype
            counts[at, dtype] += (prod(box.shape) + 1) * ITEMSIZE[dtype]
    yield from (("all_reduce", n) for n in counts.values())
