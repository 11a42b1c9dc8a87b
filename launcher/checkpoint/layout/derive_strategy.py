"""Derives strategies from a plan, from another strategy, or from the target that a job requests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

from launcher.checkpoint.layout.strategy import STAGE, Entry, Strategy, relaid, stages
from launcher.errors import Problem, RequestError
from launcher.plan.plan import Plan
from launcher.plan.resolve.checkpoint import AVERAGE
from launcher.plan.resolve.transform_targets import unmergeable
from launcher.plan.values.grid import Grid
from launcher.plan.values.optimizer import factor_layout

LARGE = 64 * 1024  # bytes; the default of parallel.hsdp.threshold
REPLICAS = ("dp_replicate", "dp_shard")


def strategy_of_plan(plan: Plan, only_trainable: bool = False) -> Strategy:
    """Returns the layouts of every parameter and persistent buffer, or of trainable parameters only."""
    entries = {
        p.name: Entry(p.layout, p.spec.dtype, "buffer" if p.buffer else "param", p.names[1:])
        for p in plan.params
        if p.trainable or not only_trainable
    }
    return Strategy(plan.sizes.grid, entries)


def strategy_to_load(plan: Plan, source: Collection[str]) -> Strategy:
    """Returns the strategy of the tensors that a run of ``plan`` loads.

    ``source`` has the names of the tensors that it is loaded from. The strategy has all tensors of the plan.
    If the source has no adapters, they are left out: they keep the values that they have at step 0.
    """
    everything = strategy_of_plan(plan)
    adapters = {p.name for p in plan.params if p.role == "adapter"}
    if not adapters or adapters.intersection(source):
        return everything
    return replace(everything, entries={n: e for n, e in everything.entries.items() if n not in adapters})


def with_left_out_tensors(target: Strategy, src: Strategy) -> Strategy:
    """Returns ``target``, completed with those tensors of ``src`` that a strategy may leave out.

    A buffer or an untrained parameter belongs to the stages that have the other tensors of its module; each
    rank of these stages has the full tensor. An optimizer state has the layout of its parameter. If its shape
    differs from the parameter's, as that of a step counter does, each rank that holds the parameter has the
    full state. The exception is a factor over rows or columns, which is cut where the parameter is cut.
    """
    entries = {**target.entries, **_untrained(target, src)}
    for name, entry in src.entries.items():
        param = name.split(".", 2)[2] if name.startswith("optim.") and name.count(".") > 1 else ""
        first = target.named.get(param, param)
        if entry.kind != "optim" or name in target.named or first not in entries:
            continue

        layout = entries[first].layout
        own = factor_layout(name.split(".", 2)[1], layout)
        if own is not None and own.shape == entry.layout.shape:
            layout = own
        if layout.shape != entry.layout.shape:
            shape = entry.layout.shape
            layout = replace(layout, shape=shape, split=((),) * len(shape))
        entries[name] = Entry(layout, entry.dtype, "optim")
    return Strategy(target.grid, entries)


def _untrained(target: Strategy, src: Strategy) -> dict[str, Entry]:
    """Returns the entries of ``src`` that are missing in ``target``, a strategy of trainable parameters.

    The result is empty if ``target`` has names that ``src`` does not have, or leaves out a parameter that has
    optimizer states: it is then not the strategy of this model.
    """
    omitted = {
        name: entry
        for name, entry in src.entries.items()
        if entry.kind != "optim" and target.named.keys().isdisjoint((name, *entry.aliases))
    }
    states = (name.split(".", 2)[2:] for name in src.only("optim").entries if name.startswith("optim."))
    trained = {param for rest in states for param in rest}
    trained |= {name.partition(".")[2] for name in src.only("optim").entries}
    if not target.named.keys() <= src.named.keys() or trained & omitted.keys():
        return {}

    # the stages that have tensors of each module
    below: dict[str, set[int]] = {}
    for name, entry in target.entries.items() if omitted else ():
        for module in _modules(name):
            below.setdefault(module, set()).update(stages(entry.layout))

    count = target.stages
    entries = {}
    for name, entry in omitted.items():
        at = next((below[module] for module in _modules(name) if module in below), set(range(count)))
        pinned = ((STAGE, tuple(sorted(at))),) if len(at) < count else ()
        entries[name] = relaid(entry, target.grid, (), pinned)
    return entries


def _modules(name: str) -> list[str]:
    """Returns the modules around a tensor, from the innermost to the model itself, which is ``""``.

    >>> _modules("net.bn.running_mean")
    ['net.bn', 'net', '']
    """
    parts = name.split(".")[:-1]
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def sources(src: object, strategy: Strategy, averaged: bool) -> dict[str, str]:
    """Maps the name of each parameter and buffer to the name of the tensor to read for it.

    If ``averaged``, this is its moving average, or the tensor itself if it is not trained and so has none.
    Raises ``ValueError`` naming ``src`` if no tensor has a moving average.
    """
    own = {name: name for name in strategy.only("param", "buffer").entries}
    if not averaged:
        return own
    means = {name: mean for name in own if (mean := f"optim.{AVERAGE}.{name}") in strategy.entries}
    if not means:
        raise ValueError(f"{src}: it has no moving average of its weights: it was trained without train.ema")
    return own | means


def target_strategy(src: Strategy, *, nproc: int, stages: int, shard_size: int, tp: int = 1) -> Strategy:
    """Lays the tensors of ``src`` out over ``stages`` pipeline stages, each of ``nproc // stages`` ranks.

    Stages are merged but never cut, because cutting one requires the model: source stage ``s`` goes to stage
    ``s * stages // source stages``. A tied tensor of several source stages goes with each of them.
    ``shard_size`` ranks cut dim 0 of the tensors that the source cuts along any dim; if it cuts none, they
    cut parameters and optimizer states of at least 64 KiB. ``tp`` ranks cut the dims that the source cuts for
    tensor parallelism. Raises ``RequestError``.
    """
    layout = {"nproc": nproc, "stages": stages, "shard_size": shard_size, "tp": tp}
    problems = list(unmergeable("steps.transform", src.stages, **layout))
    if tp > 1 and all(_operator_dim(e) is None for e in src.entries.values()):
        text = f"{tp}: the source cuts no tensor over tp, so it does not say which dims to cut"
        text += "; give steps.transform.strategy, which parallel.param_strategy.save writes"
        problems.append(Problem("steps.transform.tp", text))
    if problems:
        raise RequestError(tuple(problems))

    replicas = nproc // (stages * shard_size * tp)
    grid = Grid.of(pp=stages, dp_replicate=replicas, dp_shard=shard_size, tp=tp)
    cut = any(e.layout.axes for e in src.entries.values())
    return Strategy(grid, {n: _entry(e, grid, src.stages, cut) for n, e in src.entries.items()})


def _entry(entry: Entry, grid: Grid, before: int, cut: bool) -> Entry:
    """Lays one tensor out over ``grid``.

    ``before`` is the number of the source's stages; ``cut`` says whether the source cuts any tensor.
    """
    sharded = entry.kind != "buffer" and entry.spec.nbytes >= LARGE
    if cut:
        sharded = bool(entry.layout.axes)
    axes = ("dp_shard",) if sharded and grid["dp_shard"] > 1 else ()
    at = tuple(sorted({s * grid[STAGE] // before for s in stages(entry.layout)}))
    moved = relaid(entry, grid, axes, ((STAGE, at),))

    # tp cuts the dim that an operator cuts
    dim = _operator_dim(entry) if grid["tp"] > 1 else None
    if dim is None:
        return moved
    split = tuple(("tp", *axes) if d == dim else axes for d, axes in enumerate(moved.layout.split))
    return replace(moved, layout=replace(moved.layout, split=split))


def _operator_dim(entry: Entry) -> int | None:
    """Returns the last dim that is cut for tensor parallelism rather than for data-parallel sharding."""
    cut = [d for d, axes in enumerate(entry.layout.split) if any(a not in (STAGE, *REPLICAS) for a in axes)]
    return next((d for d in reversed(cut) if _ways(entry, d) > 1), None)


def _ways(entry: Entry, dim: int) -> int:
    """Returns the number of parts that tensor parallelism cuts ``dim`` into."""
    return prod(entry.layout.grid[a] for a in entry.layout.split[dim] if a not in (STAGE, *REPLICAS))
