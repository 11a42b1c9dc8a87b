"""Where every tensor of the model lives: its layout, its copies, and what is gathered with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.job.parallel import Hsdp
from launcher.plan.facts import Graph, Param, Skeleton, TensorSpec
from launcher.plan.layout import Layout
from launcher.plan.naming import owner, units
from launcher.plan.sizes import Sizes
from launcher.plan.stages import Stage, covers


@dataclass(frozen=True)
class Placed:
    """One tensor under its first name. ``names`` are all its names, ``stages`` the virtual stages that hold it."""

    name: str
    names: tuple[str, ...]
    spec: TensorSpec
    layout: Layout
    stages: tuple[int, ...]
    trainable: bool
    buffer: bool

    @property
    def sharded(self) -> bool:
        """Whether data-parallel ranks share one copy: it is gathered before it is used."""
        return "dp_shard" in self.layout.axes

    @property
    def nbytes(self) -> int:
        """Of what a rank uses: all of it, or its part of what ``tp`` cuts."""
        return self.spec.nbytes // (self.layout.grid["tp"] if "tp" in self.layout.axes else 1)

    def copies(self, here: tuple[int, ...]) -> tuple[int, ...]:
        """Of a rank's virtual stages, those that keep a copy of their own: stages of one rank share a whole tensor.

        FSDP2 lets no two of its roots share one, so of a sharded tensor every stage has its own.
        """
        mine = tuple(s for s in here if s in self.stages)
        return mine if self.sharded or self.buffer else mine[:1]


@dataclass(frozen=True)
class Tie:
    """A trainable tensor of several stages: gradients are summed over its copies, the first of which is saved.

    ``ranks`` are the pipeline ranks of the stages, ascending.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Sharded parameters that one collective gathers for the forward of ``module`` ("" = the whole stage)."""

    stage: int
    module: str
    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Unsharded parameters (first names) whose gradients one all-reduce sums over the data-parallel ranks."""

    stage: int
    names: tuple[str, ...]
    nbytes: int


def placed(
    skeleton: Skeleton,
    stages: tuple[Stage, ...],
    sizes: Sizes,
    hsdp: Hsdp | None,
    splits: Mapping[str, tuple[tuple[str, ...], ...]] | None = None,
) -> tuple[Placed, ...]:
    """Every tensor once, in definition order. ``splits``: the axes that operators cut dims over, by any name."""
    same: dict[str, list[Param]] = {}
    for p in skeleton.params:
        same.setdefault(p.same_as, []).append(p)
    return tuple(_placed(ps, stages, sizes, hsdp, splits or {}) for ps in same.values())


def _placed(
    ps: list[Param],
    stages: tuple[Stage, ...],
    sizes: Sizes,
    hsdp: Hsdp | None,
    splits: Mapping[str, tuple[tuple[str, ...], ...]],
) -> Placed:
    names = tuple(p.name for p in ps)
    held = tuple(s.index for s in stages if not set(names).isdisjoint(s.params))
    spec = ps[0].spec
    split = next((splits[n] for n in names if n in splits), ((),) * len(spec.shape))
    if _shards(ps[0], sizes, hsdp):
        split = ((*split[0], "dp_shard"), *split[1:])
    coords = tuple(sorted({sizes.places[s] for s in held}))
    layout = Layout(sizes.grid, spec.shape, split, (("pp", coords),))
    return Placed(names[0], names, spec, layout, held, ps[0].trainable, ps[0].buffer)


def _shards(p: Param, sizes: Sizes, hsdp: Hsdp | None) -> bool:
    """Smaller than the threshold, 0-d and empty tensors and buffers stay whole."""
    if hsdp is None or p.buffer or not p.spec.shape or sizes.grid["dp_shard"] == 1:
        return False
    return p.spec.nbytes > 0 and p.spec.nbytes >= hsdp.threshold * 1024


def ties(params: tuple[Placed, ...]) -> tuple[Tie, ...]:
    """Trainable tensors that several stages hold."""
    return tuple(Tie(p.name, p.stages, dict(p.layout.at)["pp"]) for p in params if len(p.stages) > 1 and p.trainable)


def groups(
    params: tuple[Placed, ...], stages: tuple[Stage, ...], skeleton: Skeleton, graph: Graph
) -> tuple[Group, ...]:
    """One group a unit (a block, say), and one of the whole stage for the rest: tied inside it, or used by the glue."""
    pieces = units(skeleton)
    glued = {n.target for n in graph.nodes if n.kind == "param"}
    out: list[Group] = []
    for stage in stages:
        homes: dict[str, list[Placed]] = {}
        for p in params:
            here = [n for n in p.names if n in stage.params]
            if p.sharded and here:
                around = {u for n in here for u in pieces if covers(u, owner(n))}
                alone = len(here) == 1 and len(around) == 1 and glued.isdisjoint(here) and _runs(stage, *around)
                homes.setdefault(next(iter(around)) if alone else "", []).append(p)
        for home in (*(u for u in pieces if u in homes), *([""] if "" in homes else [])):
            names = tuple(next(n for n in p.names if n in stage.params) for p in homes[home])
            out.append(Group(stage.index, home, names, sum(p.nbytes for p in homes[home])))
    return tuple(out)


def _runs(stage: Stage, unit: str) -> bool:
    """Whether the whole ``unit`` runs on ``stage`` as a module that is called."""
    return any(covers(m, unit) for m in stage.modules)


def buckets(
    params: tuple[Placed, ...], stages: tuple[Stage, ...], sizes: Sizes, limit: int = 64 << 20
) -> tuple[Bucket, ...]:
    """Greedy, in order, per stage and dtype: a new bucket starts when the next tensor would pass ``limit`` bytes."""
    if sizes.replicas == 1:
        return ()
    out: list[Bucket] = []
    for stage in stages:
        open_at: dict[str, int] = {}
        for p in params:
            if p.sharded or not p.trainable or stage.index not in p.copies(sizes.held(sizes.places[stage.index])):
                continue
            at = open_at.get(p.spec.dtype)
            if at is None or out[at].nbytes + p.nbytes > limit:
                at = open_at[p.spec.dtype] = len(out)
                out.append(Bucket(stage.index, (), 0))
            out[at] = Bucket(stage.index, (*out[at].names, p.name), out[at].nbytes + p.nbytes)
    return tuple(out)


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
