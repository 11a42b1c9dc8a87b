"""How many collectives one training step takes, and of how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from launcher.job.schema.parallel import Hsdp
from launcher.plan.cost.fusion import Bucket, Group
from launcher.plan.partition.params import Placed, Tie
from launcher.plan.partition.sizes import Sizes
from launcher.plan.partition.stages import Crossing
from launcher.plan.schedule.actions import Row, Schedule
from launcher.plan.values.facts import ITEMSIZE
from launcher.plan.values.grid import Grid
from launcher.plan.values.precision import Precision

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "send", "receive")
Event = tuple[str, int]
"""A kind, and its bytes: of the whole tensor, that is what a gather yields and what a scatter is given."""


@dataclass(frozen=True)
class Traffic:
    """What rank ``rank`` takes part in during one training step, of one kind; ``nbytes`` is their sum."""

    rank: int
    kind: str
    count: int
    nbytes: int


def traffic(
    sizes: Sizes,
    params: tuple[Placed, ...],
    ties: tuple[Tie, ...],
    groups: tuple[Group, ...],
    buckets: tuple[Bucket, ...],
    boundaries: tuple[tuple[Crossing, ...], ...],
    schedule: Schedule,
    hsdp: Hsdp | None,
    dtypes: Precision,
    pieces: tuple[int, ...] = (),
) -> tuple[Traffic, ...]:
    """Rank after rank, in the order of ``KINDS``; a kind that a rank has none of is left out.

    Collectives inside of modules, those of tensor parallelism, are not in it.
    """
    place = sizes.places
    named = {n: p for p in params for n in p.names}
    out: dict[int, list[Traffic]] = {}
    for pp in range(sizes.grid["pp"]):
        mine = [g for g in groups if place[g.stage] == pp] if hsdp else []
        same = [e for g in mine for e in _group(g, named, sizes, hsdp, dtypes)]
        if trained := [n for g in mine for n in g.names if n not in g.idle]:
            same.append(("all_reduce", len(trained)))  # which of them have a gradient anywhere, a byte each
        same += [("all_reduce", b.nbytes + _flags(b, named, dtypes)) for b in buckets if place[b.stage] == pp]
        same += [*_statistics(params, sizes, place, pp), *_messages(schedule[pp], pp, place, boundaries, pieces)]
        same.append(("all_reduce", 24))  # of the loss, the gradient norm, and whether any rank was asked to stop
        if place[-1] == pp and sizes.replicas > 1:
            same.append(("all_reduce", 8))  # of how many targets count
        for rank in sizes.grid.ranks(pp=pp):
            out[rank] = list(_sums(rank, [*same, *_tied(rank, ties, named, sizes.grid, place)]))
    return tuple(t for rank in sorted(out) for t in out[rank])


def messages(sent: tuple[Traffic, ...], sizes: Sizes) -> int:
    """Tensors that the ranks of one pipeline send each other in a step."""
    pipeline = sizes.grid.peers(0, "pp")
    return sum(t.count for t in sent if t.kind == "send" and t.rank in pipeline)


def _sums(rank: int, events: list[Event]) -> Iterator[Traffic]:
    count: Counter[str] = Counter(kind for kind, _ in events)
    for kind in KINDS:
        if count[kind]:
            yield Traffic(rank, kind, count[kind], sum(n for k, n in events if k == kind))


def _group(g: Group, named: dict[str, Placed], sizes: Sizes, hsdp: Hsdp | None, dtypes: Precision) -> Iterator[Event]:
    """level3 gathers for each forward and each backward, level1 and 2 once; level1 scatters once a step."""
    assert hsdp is not None
    held = [named[n] for n in g.names]
    shard, trained = sizes.grid["dp_shard"], [named[n] for n in g.names if n not in g.idle]
    micros = sizes.micros * sizes.pieces
    again = micros * g.calls * (1 + g.backward) if hsdp.optimizer_level == "level3" else 1
    gathered = sum(p.padded * ITEMSIZE[p.compute] for p in held)
    yield from [("all_gather", gathered)] * again
    each = 1 if hsdp.optimizer_level == "level1" else micros
    scattered = sum(p.padded * _reduced(p, dtypes) for p in trained)
    if trained:
        yield from [("reduce_scatter", scattered)] * each
        if sizes.grid["dp_replicate"] > 1:
            yield "all_reduce", scattered // shard  # of the sum over all micro batches


def _reduced(p: Placed, dtypes: Precision) -> int:
    return ITEMSIZE[dtypes.reduce if dtypes.mixed else p.spec.dtype]


def _flags(b: Bucket, named: dict[str, Placed], dtypes: Precision) -> int:
    """Each parameter adds one number: whether it has a gradient."""
    return sum(_reduced(named[n], dtypes) for n in b.names)


def _statistics(params: tuple[Placed, ...], sizes: Sizes, place: tuple[int, ...], pp: int) -> Iterator[Event]:
    """Buffers go from the first data-parallel rank to the others, a dtype at once."""
    found: Counter[str] = Counter()
    for p in params:
        if p.buffer:
            found[p.spec.dtype] += p.spec.nbytes * sum(place[s] == pp for s in p.stages)
    here = {p.spec.dtype for p in params if p.buffer and any(place[s] == pp for s in p.stages)}
    if sizes.replicas > 1:
        yield from (("broadcast", found[dtype]) for dtype in sorted(here))


def _messages(
    row: Row,
    pp: int,
    place: tuple[int, ...],
    boundaries: tuple[tuple[Crossing, ...], ...],
    pieces: tuple[int, ...],
) -> Iterator[Event]:
    """Values go forward, gradients of what is floating come back; within a rank nothing is sent."""
    last = len(place) - 1
    for a in row:
        forward = a.kind == "F"
        if a.kind == "W":
            continue
        before, after = ("receive", "send") if forward else ("send", "receive")
        part = (pieces[a.micro % len(pieces)], sum(pieces)) if pieces else (1, 1)
        if a.stage > 0 and place[a.stage - 1] != pp:
            yield from ((before, n) for n in _specs(boundaries[a.stage - 1], forward, *part))
        if a.stage < last and place[a.stage + 1] != pp:
            yield from ((after, n) for n in _specs(boundaries[a.stage], forward, *part))


def _specs(crossing: tuple[Crossing, ...], forward: bool, length: int, whole: int) -> list[int]:
    """Bytes of each tensor for ``length`` of ``whole`` positions."""
    return [t.nbytes * length // whole for c in crossing for t in c.specs if forward or "float" in t.dtype]


def _tied(
    rank: int, ties: tuple[Tie, ...], named: dict[str, Placed], grid: Grid, place: tuple[int, ...]
) -> Iterator[Event]:
    """One sum for the tensors of a dtype that the same pipeline ranks share."""
    found: Counter[tuple[tuple[int, ...], str]] = Counter()
    pp = grid.coords(rank)["pp"]
    for tie in ties:
        at = tuple(sorted({place[s] for s in tie.stages}))
        box = named[tie.name].layout.box(rank)
        if tie.trained and pp in at and len(at) > 1 and box is not None:
            dtype = named[tie.name].spec.dtype
            found[at, dtype] += (prod(box.shape) + 1) * ITEMSIZE[dtype]
    yield from (("all_reduce", n) for n in found.values())
