"""What travels together: sharded weights gathered in one collective, whole gradients summed in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.plan.operators.resolve import Spread
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.partition.stage_config import owner, units
from launcher.plan.partition.stages import Stage, covers
from launcher.plan.values.facts import ITEMSIZE, Graph, Skeleton


@dataclass(frozen=True)
class Group:
    """Sharded parameters that one collective gathers for the forward of ``modules`` ("" = the whole stage).

    ``nbytes`` is the size of the whole weights as they are gathered. ``chained``: it works on what the group before it
    has made, so going backward that one is needed next. ``calls``: how often it runs in a forward. ``idle``: names
    that take no gradient. ``backward``: something in it or before it learns, so gradients come through.
    """

    stage: int
    modules: tuple[str, ...]
    names: tuple[str, ...]
    nbytes: int
    chained: bool = False
    calls: int = 1
    idle: tuple[str, ...] = ()
    backward: bool = True


@dataclass(frozen=True)
class Bucket:
    """Unsharded parameters (first names) whose gradients one all-reduce sums over the data-parallel ranks."""

    stage: int
    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Limits:
    """``each``: nothing is fused, every module and parameter travels alone.

    ``gather``: neighbouring units are gathered together up to so many bytes, ``None``: each unit by itself.
    ``reduce``: bytes of an all-reduce bucket. ``cuts``: a bucket ends before the trainable parameters with these
    numbers, instead.
    """

    each: bool
    gather: int | None
    reduce: int
    cuts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Fused:
    """What a plan sends together; ``late``: weight gradients come after the backward that sends inputs' on.

    ``terms`` are the buckets over ``tp``, ``tied`` the tied parameters that learn, ``spreads`` the operators that are
    cut. ``loss_cut``: the classes of the loss are cut over ``tp``.
    """

    limits: Limits
    params: tuple[Placed, ...]
    groups: tuple[Group, ...]
    buckets: tuple[Bucket, ...]
    terms: tuple[Bucket, ...] = ()
    tied: int = 0
    late: bool = False
    spreads: tuple[Spread, ...] = ()
    loss_cut: bool = False

    @property
    def sums(self) -> tuple[Bucket, ...]:
        """All buckets of whole gradients: over the data-parallel ranks and over ``tp``."""
        return (*self.buckets, *self.terms)

    @property
    def whole(self) -> int:
        """Parameters whose gradients are summed whole over the data-parallel ranks."""
        return len({n for b in self.buckets for n in b.names})

    @property
    def rest(self) -> int:
        """Most parameters of several modules that one gather takes although nothing is to be fused."""
        return max((len(g.names) for g in self.groups if len({owner(n) for n in g.names}) > 1), default=0)


Row = tuple[tuple[str, ...], list[Placed]]
"""Modules that are gathered together, and their parameters."""


def groups(
    params: tuple[Placed, ...], stages: tuple[Stage, ...], skeleton: Skeleton, graph: Graph, limits: Limits
) -> tuple[Group, ...]:
    """One group a unit (a block, say), or several that fit the limit; one of the whole stage for the rest.

    The rest is what is tied inside a stage, and what code outside of its unit uses. Inner modules come first. What
    looks at data may call what is inside of it on some ranks only: all of that is gathered with it.
    """
    return tuple(g for stage in stages for g in _groups(params, stage, skeleton, graph, limits))


def _groups(
    params: tuple[Placed, ...], stage: Stage, skeleton: Skeleton, graph: Graph, limits: Limits
) -> Iterator[Group]:
    pieces = _pieces(skeleton, graph, limits)
    inner_first = sorted((u for u in pieces if u), key=lambda u: -u.count("."))
    left = {p.name: p for p in params if p.sharded and not set(p.names).isdisjoint(stage.params)}
    homes: dict[str, list[Placed]] = {}
    for unit in inner_first:
        inside = [p for p in left.values() if any(covers(unit, owner(n)) for n in p.names if n in stage.params)]
        called = not graph.order or (unit, True) in graph.order  # not only its forward, which runs no hook
        if inside and called and _runs(stage, unit) and _alone(unit, inside, stage, graph):
            homes[unit] = [left.pop(p.name) for p in inside]
    rows: list[Row] = [((u,), homes[u]) for u in (inner_first if limits.each else pieces) if u in homes]
    rows += [(("",), list(left.values()))] if left else []
    before, calls = "", dict(graph.calls)
    first = next((i for i, p in enumerate(params) if p.trainable and stage.index in p.stages), len(params))
    for modules, held in rows if limits.gather is None else _fused(rows, graph, limits.gather):
        names = tuple(next(n for n in p.names if n in stage.params) for p in held)
        chained, often = (before, modules[0]) in graph.chains, max(calls.get(m, 1) for m in modules)
        idle = tuple(n for n, p in zip(names, held, strict=True) if not p.trainable)
        through = modules == ("",) or stage.index > 0 or params.index(held[-1]) >= first
        yield Group(stage.index, modules, names, sum(p.gathered for p in held), chained, often, idle, through)
        before = modules[-1]


def _pieces(skeleton: Skeleton, graph: Graph, limits: Limits) -> list[str]:
    """What may be gathered by itself, in definition order; nothing inside of a unit's module that looks at data.

    Units stay apart inside of a module that looks, unless it was seen to steer them: most only check their inputs. What
    one checkpoint runs again is one: recomputed, its units come by in another order than a backward's.
    """
    whole = units(skeleton)
    found = {owner(p.name) for p in skeleton.params} if limits.each else set(whole)
    found = {m for m in found if not any(covers(n, m) for n in graph.nested)}  # FSDP2 wraps no call inside of a call
    looks = {m for m in graph.looks if graph.steers or any(covers(u, m) for u in whole)}
    looks |= set(graph.recomputed)
    looks = {m for m in looks if not any(covers(o, m) for o in looks - {m})}
    around = {o for o in looks if any(covers(o, m) for m in found)}
    return [m for m in skeleton.modules if m in around or (m in found and not any(covers(o, m) for o in looks))]


def _alone(unit: str, inside: list[Placed], stage: Stage, graph: Graph) -> bool:
    """Whether all parameters ``inside`` of ``unit`` are used while it runs, and by nothing else.

    A module that is gathered takes all its parameters with it, so one that others use keeps all of them out. What looks
    at data may have used none of them on zeros.
    """
    glued = {n.target for n in graph.nodes if n.kind == "param"}
    scopes = dict(graph.scopes)
    here = [n for p in inside for n in p.names if n in stage.params]
    used = [s for n in here if (s := scopes.get(n, owner(n))) is not None]
    runs = bool(used) or unit in graph.looks
    return runs and glued.isdisjoint(here) and all(covers(unit, m) for m in (*used, *map(owner, here)))


def _fused(rows: list[Row], graph: Graph, limit: int) -> list[Row]:
    """Neighbours together, greedily, while they fit; with the rest of the stage, all are the rest.

    Only units that feed each other: torch reduces a group once the first of its modules has gone backward, so every
    other one must have been there before.
    """
    out: list[Row] = []
    for modules, held in rows:
        near = bool(out) and ((out[-1][0][-1], modules[0]) in graph.chains or modules == ("",))
        if near and sum(p.gathered for p in (*out[-1][1], *held)) <= limit:
            before, others = out[-1]
            out[-1] = (modules if modules == ("",) else (*before, *modules), [*others, *held])
        else:
            out.append((modules, held))
    return out


def _runs(stage: Stage, unit: str) -> bool:
    """Whether the whole ``unit`` runs on ``stage`` as a module that is called."""
    return any(covers(m, unit) for m in stage.modules)


def buckets(
    params: tuple[Placed, ...], stages: tuple[Stage, ...], sizes: Sizes, limits: Limits, reduce: str | None = None
) -> tuple[Bucket, ...]:
    """Greedy, in order, per stage and dtype: a new bucket starts when the next tensor would pass the limit.

    ``reduce``: the dtype that gradients travel in; ``None``: their own.
    """
    if sizes.replicas == 1:
        return ()
    number = {p.name: i for i, p in enumerate(p for p in params if p.trainable)}
    out: list[Bucket] = []
    for stage in stages:
        open_at: dict[str, int] = {}
        for p in params:
            here = p.copies(sizes.held(sizes.places[stage.index]))
            if p.sharded or not p.trainable or stage.index not in here:
                continue
            at, size = open_at.get(p.spec.dtype), p.elements * ITEMSIZE[reduce or p.spec.dtype]
            if at is None or _full(out[at], size, number, p.name, limits):
                at = open_at[p.spec.dtype] = len(out)
                out.append(Bucket(stage.index, (), 0))
            out[at] = Bucket(stage.index, (*out[at].names, p.name), out[at].nbytes + size)
    return tuple(out)


def _full(bucket: Bucket, size: int, number: dict[str, int], name: str, limits: Limits) -> bool:
    if limits.cuts is not None:
        return any(number[bucket.names[-1]] < cut <= number[name] for cut in limits.cuts)
    return bucket.nbytes + size > limits.reduce


def sums(
    params: tuple[Placed, ...], stages: tuple[Stage, ...], sizes: Sizes, partial: frozenset[str]
) -> tuple[Bucket, ...]:
    """Parameters of whose gradient each rank of ``tp`` has a term: one all-reduce a stage and dtype."""
    out: dict[tuple[int, str], list[Placed]] = {}
    for stage in stages:
        for p in params:
            copies = p.copies(sizes.held(sizes.places[stage.index]))
            if p.trainable and stage.index in copies and not partial.isdisjoint(p.names):
                out.setdefault((stage.index, p.spec.dtype), []).append(p)
    return tuple(Bucket(s, tuple(p.name for p in ps), sum(map(_kept, ps))) for (s, _), ps in out.items())


def _kept(p: Placed) -> int:
    """Bytes of a rank's own gradient."""
    return p.nbytes // p.layout.grid["dp_shard"] if p.sharded else p.nbytes
