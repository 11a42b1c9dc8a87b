"""Which tensors share a collective: sharded weights an all-gather, unsharded gradients an all-reduce."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.cut.stages import Stage, around, covers
from launcher.plan.cut.tensor_placement import Placed, by_stage
from launcher.plan.cut.uncut_modules import units
from launcher.plan.sizes import Sizes
from launcher.plan.tensor_parallel.input_gradients import InputGradients, input_gradients_of
from launcher.plan.tensor_parallel.sharded_operators import ShardedOperator
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.model_graph import Graph, ModelStructure
from launcher.plan.values.module_names import owner


@dataclass(frozen=True)
class GatherGroup:
    """Sharded parameters that one collective gathers for the forward of ``modules`` ("" = the full stage).

    ``nbytes`` is the size of the full weights as they are gathered. ``chained``: the group uses the output of
    the group before it, so a backward needs that one next. ``calls``: the number of times that a forward runs
    the group. ``idle``: parameters that get no gradient. ``backward``: true if gradients pass through the
    group, because it or an earlier one is trained.
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
    """Parameters (first names) whose gradients share one collective."""

    stage: int
    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Limits:
    """How much communication is fused.

    ``each``: nothing is fused; every module and every parameter has its own collective. ``gather``:
    consecutive units share one all-gather of at most this many bytes; ``None``: one all-gather per unit.
    ``scatter``: the same for the reduce-scatter of level1; ``None``: as the all-gathers. ``reduce``: the
    bytes of an all-reduce bucket. ``cuts`` replaces ``reduce``: a bucket ends before the trainable parameters
    with these numbers.
    """

    each: bool
    gather: int | None
    reduce: int
    cuts: tuple[int, ...] | None = None
    scatter: int | None = None


@dataclass(frozen=True)
class Communication:
    """The fused communication of a plan.

    ``scatters`` are the buckets that level1 reduce-scatters, ``terms`` are the buckets over ``tp``, ``tied``
    is the number of tied parameters that are trained, ``spreads`` are the operators that are cut. ``late``:
    weight gradients are computed after the input gradients have been sent. ``loss_cut``: the classes of the
    loss are cut over ``tp``. ``compiled``: modules that torch compiles.
    """

    limits: Limits
    params: tuple[Placed, ...]
    groups: tuple[GatherGroup, ...]
    buckets: tuple[Bucket, ...]
    scatters: tuple[Bucket, ...] = ()
    terms: tuple[Bucket, ...] = ()
    tied: int = 0
    late: bool = False
    spreads: tuple[ShardedOperator, ...] = ()
    loss_cut: bool = False
    compiled: tuple[str, ...] = ()

    def input_gradients(self, ops: Collection[str]) -> InputGradients:
        """Returns how operators send their input gradients, for those that send them by one of ``ops``."""
        learn = {n for p in self.params if p.trainable for n in p.names}
        cut = [s.operator.module for s in self.spreads]
        compiled = {m for m in cut if any(covers(c, m) for c in self.compiled)}
        return input_gradients_of(self.spreads, ops, learn, compiled, late=self.late)

    @property
    def sums(self) -> tuple[Bucket, ...]:
        """All buckets of unsharded gradients: over the data-parallel ranks and over ``tp``."""
        return (*self.buckets, *self.terms)

    @property
    def unsharded(self) -> int:
        """The number of parameters whose full gradients are summed over the data-parallel ranks."""
        return len({n for b in self.buckets for n in b.names})

    @property
    def rest(self) -> int:
        """The largest number of parameters that one all-gather covers because no single module owns them."""
        return max((len(g.names) for g in self.groups if len({owner(n) for n in g.names}) > 1), default=0)


@dataclass(frozen=True)
class _Gather:
    """Modules that are gathered together, and their parameters."""

    modules: tuple[str, ...]
    params: tuple[Placed, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.gathered for p in self.params)


def groups(
    params: tuple[Placed, ...],
    stages: tuple[Stage, ...],
    skeleton: ModelStructure,
    graph: Graph,
    limits: Limits,
) -> tuple[GatherGroup, ...]:
    """Returns the all-gather groups of all stages.

    There is one per unit (such as a block), or per several units that fit the limit. The remaining parameters
    are one more group, which is gathered for the full stage: those that are tied inside it, or that code
    outside of their unit uses. Inner modules come first. A module whose code reads tensor values may call
    submodules on some ranks only, so all of them are gathered with it.
    """
    units = _units(skeleton, graph, limits)
    stage_params = by_stage(params)
    return tuple(
        group
        for stage in stages
        for group in _groups(stage_params.get(stage.index, []), stage, units, graph, limits=limits)
    )


def _groups(
    params: Sequence[Placed], stage: Stage, units: list[str], graph: Graph, limits: Limits
) -> Iterator[GatherGroup]:
    # each parameter belongs to the innermost unit that is its only user
    here = {*stage.params}
    inner_first = sorted((u for u in units if u), key=lambda u: -u.count("."))
    homes, rest = _homes(params, {*stage.modules}, here, inner_first, graph=graph)

    # in gathering order; the rest, which belongs to the full stage, comes last
    order = inner_first if limits.each else units
    gathers = [_Gather((u,), homes[u]) for u in order if u in homes]
    if rest:
        gathers.append(_Gather(("",), rest))
    if limits.gather is not None:
        gathers = _fused(gathers, {*graph.chains}, limits.gather)

    # gradients pass through a group if it or one before it is trained
    at = {p.name: i for i, p in enumerate(params)}
    learns = next((i for i, p in enumerate(params) if p.trainable), len(params))
    calls, chains = dict(graph.calls), {*graph.chains}
    before = ""
    for gather in gathers:
        names = tuple(next(n for n in p.names if n in here) for p in gather.params)
        yield GatherGroup(
            stage=stage.index,
            modules=gather.modules,
            names=names,
            nbytes=gather.nbytes,
            chained=(before, gather.modules[0]) in chains,
            calls=max(calls.get(m, 1) for m in gather.modules),
            idle=tuple(n for n, p in zip(names, gather.params, strict=True) if not p.trainable),
            backward=gather.modules == ("",) or stage.index > 0 or learns <= at[gather.params[-1].name],
        )
        before = gather.modules[-1]


def _homes(
    params: Sequence[Placed], modules: set[str], names: set[str], units: list[str], *, graph: Graph
) -> tuple[dict[str, tuple[Placed, ...]], tuple[Placed, ...]]:
    """Returns the sharded parameters by the first unit that can gather them, and the remaining ones.

    ``modules`` and ``names`` are those of the stage: modules that it calls, and tensors that it has.
    """
    remaining = {p.name: p for p in params if p.sharded}

    # the parameters that a unit contains under a name of the stage
    contained: dict[str, dict[str, Placed]] = {}
    for p in remaining.values():
        for unit in {u for n in p.names if n in names for u in around(owner(n))}:
            contained.setdefault(unit, {})[p.name] = p

    begun = {module for module, begins in graph.order if begins}
    scopes = dict(graph.scopes) | {n.target: "" for n in graph.nodes if n.kind == "param"}
    homes: dict[str, tuple[Placed, ...]] = {}
    for unit in units:
        if modules.isdisjoint(around(unit)):  # not all of it runs through module calls
            continue
        inside = [p for name, p in contained.get(unit, {}).items() if name in remaining]
        called = not graph.order or unit in begun  # a direct call of its forward runs no hooks
        here = [n for p in inside for n in p.names if n in names]
        if inside and called and _alone(unit, here, scopes, looks=unit in graph.value_readers):
            homes[unit] = tuple(remaining.pop(p.name) for p in inside)
    return homes, tuple(remaining.values())


def _units(skeleton: ModelStructure, graph: Graph, limits: Limits) -> list[str]:
    """Returns the modules that may be gathered separately, in definition order.

    A module that reads tensor values is gathered with everything inside it. If it contains units, they stay
    separate unless the trace showed that it steers them: most such modules only check their inputs. Modules
    that one activation checkpoint runs again are gathered as one, because recomputation visits units in
    another order than a backward.
    """
    all_units = units(skeleton)
    candidates = {owner(p.name) for p in skeleton.params} if limits.each else set(all_units)

    # FSDP2 does not support a module that runs inside itself
    candidates = {m for m in candidates if not any(covers(n, m) for n in graph.nested)}

    # the outermost modules whose contents must be gathered together
    every = graph.data_decides_calls
    looks = {m for m in graph.value_readers if every or any(covers(u, m) for u in all_units)}
    looks |= set(graph.recomputed)
    looks = {m for m in looks if not any(covers(o, m) for o in looks - {m})}

    around = {o for o in looks if any(covers(o, m) for m in candidates)}
    separate = {m for m in candidates if not any(covers(o, m) for o in looks)}
    return [m for m in skeleton.modules if m in around | separate]


def _alone(unit: str, names: list[str], scopes: Mapping[str, str | None], *, looks: bool) -> bool:
    """Returns true if ``unit`` runs whenever one of its parameters, whose names are ``names``, is used.

    A group takes all parameters of its module or none: if other code uses one of them, none are taken. A
    module that ``looks`` at tensor values may have used none of them in the trace, whose inputs are zeros.
    ``scopes``: ``Graph.scopes``, and "" for each parameter that code outside of modules uses.
    """
    users = [scopes.get(n, owner(n)) for n in names]
    used = [user for user in users if user is not None]
    if not used and not looks:
        return False
    return all(covers(unit, m) for m in (*used, *map(owner, names)))


def _fused(gathers: list[_Gather], chains: set[tuple[str, str]], limit: int) -> list[_Gather]:
    """Merges consecutive gathers greedily up to the limit.

    A merge with the remaining parameters becomes the group of the remaining parameters. Only units that feed
    each other are merged: torch reduces a group as soon as the backward of its first module is done, so the
    backwards of all the others must be done before.
    """
    out: list[_Gather] = []
    for gather in gathers:
        if out and _feeds(out[-1], gather, chains) and out[-1].nbytes + gather.nbytes <= limit:
            rest = gather.modules == ("",)
            modules = gather.modules if rest else (*out[-1].modules, *gather.modules)
            out[-1] = _Gather(modules, (*out[-1].params, *gather.params))
        else:
            out.append(gather)
    return out


def _feeds(before: _Gather, gather: _Gather, chains: set[tuple[str, str]]) -> bool:
    """Returns true if ``gather`` uses the output of the one before it, or is the rest of a stage."""
    return gather.modules == ("",) or (before.modules[-1], gather.modules[0]) in chains


def buckets(
    params: tuple[Placed, ...],
    stages: tuple[Stage, ...],
    sizes: Sizes,
    limits: Limits,
    reduce: str | None = None,
) -> tuple[Bucket, ...]:
    """Fills all-reduce buckets greedily, in order, per stage and dtype.

    A bucket ends when the next tensor would exceed the limit. ``reduce``: the dtype in which gradients are
    sent; ``None``: their own.
    """
    if sizes.replicas == 1:
        return ()

    number = {p.name: i for i, p in enumerate(p for p in params if p.trainable)}
    stage_params = by_stage(params)
    out: list[Bucket] = []
    for stage in stages:
        last: dict[str, int] = {}  # for each dtype, the bucket that is being filled
        for p in _learning(stage_params, stage, sizes):
            if p.sharded:
                continue
            alone = Bucket(stage.index, (p.name,), p.elements * ITEMSIZE[reduce or p.spec.dtype])
            at = last.get(p.spec.dtype)

            # into the bucket of its dtype, or a new one
            if at is None or _full(out[at], alone, number, limits):
                last[p.spec.dtype] = len(out)
                out.append(alone)
            else:
                names, nbytes = (*out[at].names, p.name), out[at].nbytes + alone.nbytes
                out[at] = Bucket(stage.index, names, nbytes)
    return tuple(out)


def _learning(stage_params: Mapping[int, list[Placed]], stage: Stage, sizes: Sizes) -> list[Placed]:
    """Returns the parameters whose gradients ``stage`` sums.

    If stages of one rank share a parameter, the first of them sums its gradient.
    """
    here = sizes.stages_of(sizes.places[stage.index])
    return [p for p in stage_params.get(stage.index, []) if p.trainable and stage.index in p.copies(here)]


def _full(bucket: Bucket, alone: Bucket, number: dict[str, int], limits: Limits) -> bool:
    """Returns true if ``alone``, the bucket of the next parameter, must not join ``bucket``.

    ``number``: the number of each trainable parameter.
    """
    if limits.cuts is not None:
        last, following = number[bucket.names[-1]], number[alone.names[0]]
        return any(last < cut <= following for cut in limits.cuts)
    return bucket.nbytes + alone.nbytes > limits.reduce


def sums(
    params: tuple[Placed, ...], stages: tuple[Stage, ...], sizes: Sizes, partial: frozenset[str]
) -> tuple[Bucket, ...]:
    """Returns one bucket per stage and dtype of the gradients that are summed over ``tp``.

    ``partial``: the names of their parameters.
    """
    stage_params = by_stage(params)
    by_stage_and_dtype: dict[tuple[int, str], list[Placed]] = {}
    for stage in stages:
        for p in _learning(stage_params, stage, sizes):
            if not partial.isdisjoint(p.names):
                by_stage_and_dtype.setdefault((stage.index, p.spec.dtype), []).append(p)
    return tuple(
        Bucket(stage, tuple(p.name for p in together), sum(_kept(p) for p in together))
        for (stage, _), together in by_stage_and_dtype.items()
    )


def _kept(p: Placed) -> int:
    """Returns the bytes of the gradient that one rank keeps."""
    return p.nbytes // p.layout.grid["dp_shard"] if p.sharded else p.nbytes
