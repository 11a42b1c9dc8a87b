"""Applies parameter layouts that a request loads from a file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.layout.strategy import Strategy, meaning, row, tensor_specs
from launcher.checkpoint.layout.strategy_file import load
from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Hsdp, Parallel
from launcher.optional import mindspore
from launcher.plan.plan import Plan
from launcher.plan.tensor_parallel import strategies_of_layouts, strategy_reader
from launcher.plan.tensor_parallel.strategies_of_layouts import KEY, SHARD, ParamLayouts, on_grid
from launcher.plan.tensor_parallel.strategy_reader import TP
from launcher.plan.values.grid import Grid
from launcher.plan.values.model_graph import ModelStructure
from launcher.plan.values.resolved import Resolved
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.plan.values.text import many
from launcher.untrusted.files import RefusedFile, read_bytes

MOST_PROBLEMS = 3
TP_KEY = "parallel.grid.tp"


def degrees(par: Parallel, tp_from: str, *, apart: bool) -> tuple[dict[str, Any], int | None, list[Problem]]:
    """Returns settings of ``parallel`` that follow from the file alone: ``tp`` and weight sharding.

    Args:
        par: the settings of the request.
        tp_from: the setting that ``tp`` comes from, if it is set.
        apart: the operators use device matrices.

    Returns:
        The settings; the number of ranks in the file, if its layouts use device matrices, because the
        operators do or because the layouts fit no ``tp``; and the problems.
    """
    path = par.param_strategy.load
    assert path is not None
    try:
        stored = _stored(Path(path))
        sharded = par.hsdp is not None and (par.grid.tp or 1) == 1
        if apart or (par.grid.tp is None and _over_matrices(stored, sharded=sharded)):
            return {}, _entries(stored).grid.size, []
        tp, shards = _degrees(stored, sharded=sharded)
    except (RequestError, ValueError) as error:
        problems = error.problems if isinstance(error, RequestError) else (Problem(KEY, f"{path}: {error}"),)
        return {}, None, [*problems]

    # compare with the request's own tp
    requested = {tp_from: par.grid.tp, "parallel.operators": strategy_reader.degree(par.operators)[0]}
    for key, other in requested.items():
        if other not in (None, tp):
            cure = f"{key}={tp}" if key == TP_KEY else ""
            text = f"{path}: its layouts are cut over {many(tp, 'rank')} of {TP}, but {key} has {other}"
            return {}, None, [Problem(KEY, text, cure)]

    changes: dict[str, Any] = {}
    if tp > 1:
        changes["grid"] = par.grid.model_copy(update={TP: tp})
    if shards > 1 and par.hsdp is None:
        changes["hsdp"] = Hsdp(shard_size=shards)
    return changes, None, []


def _degrees(stored: Strategy | mindspore.StrategyFile, *, sharded: bool) -> tuple[int, int]:
    """Returns the sizes of ``tp`` and ``dp_shard``; ``sharded``: the request itself shards weights."""
    if not isinstance(stored, Strategy):
        shards = max((s.shards for s in stored.layouts.values()), default=1)
        plain = {name: replace(s, shard_size=0) for name, s in stored.layouts.items()}
        stored = mindspore.on_paper(replace(stored, layouts=plain), None)[0]
    elif TP in stored.grid.sizes:
        used = any(SHARD in entry.layout.axes for entry in stored.entries.values() if entry.kind == "param")
        return stored.grid[TP], stored.grid.sizes.get(SHARD, 1) if used else 1
    else:
        shards = 1
    return strategies_of_layouts.degree((e.layout for e in stored.entries.values()), sharded=sharded), shards


def _over_matrices(stored: Strategy | mindspore.StrategyFile, *, sharded: bool) -> bool:
    """Returns true if parameters have device matrices of their own, or layouts that fit no ``tp``."""
    if isinstance(stored, Strategy) and stored.other_grids:
        return True
    tp, _ = _degrees(stored, sharded=sharded)
    layouts = [entry.layout for entry in _entries(stored).entries.values() if entry.kind == "param"]
    return not strategies_of_layouts.fits_axes(layouts, tp)


def _entries(stored: Strategy | mindspore.StrategyFile) -> Strategy:
    return mindspore.on_paper(stored, None)[0] if not isinstance(stored, Strategy) else stored


def with_threshold(resolved: Resolved, skeleton: ModelStructure, grid: Grid) -> Resolved:
    """Sets ``hsdp.threshold`` so that exactly the parameters that are sharded in the file are sharded."""
    job, hsdp = resolved.job, resolved.job.parallel.hsdp
    file = laid_out(job, skeleton, grid.size) if resolved.threshold_from_file else None
    if hsdp is None or file is None:
        return resolved
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for p in skeleton.params:
        split = on_grid(file.layouts[p.name], grid) if p.name in file.layouts and not p.buffer else None
        if split is not None:
            sizes[any(SHARD in axes for axes in split)].append(p.spec.nbytes)

    # keep the default if it has the same effect
    least = min(sizes[True], default=0)
    usual = least >= hsdp.threshold * 1024 > max(sizes[False], default=0)
    if usual or not sizes[True]:
        return resolved
    changed = hsdp.model_copy(update={"threshold": least // 1024})
    return resolved.with_job(
        job.model_copy(update={"parallel": job.parallel.model_copy(update={"hsdp": changed})})
    )


def laid_out(job: Job, skeleton: ModelStructure, ranks: int) -> ParamLayouts | None:
    """Returns the file's layouts for the parameters of this model.

    Returns ``None`` without a file or for other ranks. Raises ``RequestError`` if names or shapes do not fit.
    """
    settings = job.parallel.param_strategy
    if settings.load is None:
        return None
    left_out = {p.name for p in skeleton.params if settings.only_trainable and not p.trainable}
    specs = {p.name: p.spec for p in skeleton.params}
    theirs = _with_shapes(_stored(Path(settings.load)), specs, settings.load)
    if theirs.grid.size != ranks:
        return None  # reported by ``check_stored_layouts``
    names = (n for n in theirs.named if n in specs and n not in left_out)
    layouts = {n: theirs.entries[theirs.named[n]].layout for n in names}
    shapes = {n: [list(layout.shape), list(specs[n].shape)] for n, layout in layouts.items()}
    _refuse(settings.load, [f"{n} has shape {a}, in the model {b}" for n, (a, b) in shapes.items() if a != b])
    return ParamLayouts(settings.load, layouts)


def check_stored_layouts(job: Job, plan: Plan) -> None:
    """Raises ``RequestError`` unless the layouts of ``param_strategy.load`` are the plan's, for each tensor.

    It also raises if MindSpore's format cannot represent the layouts that ``param_strategy.save`` is to
    contain.
    """
    settings = job.parallel.param_strategy
    mine = strategy_of_plan(plan, settings.only_trainable)
    if settings.save is not None and settings.save.endswith(".ckpt"):
        _sayable(mine, settings.save)
    if settings.load is None:
        return

    # compare names
    stored = _stored(Path(settings.load))
    specs = tensor_specs(mine)
    left_out = (
        {n for p in plan.params if not p.trainable for n in p.names} if settings.only_trainable else set()
    )
    names = _names(stored)
    absent = [f"{n} is not in the file" for n in mine.entries if n not in names]
    absent += [f"{n} is not in the model" for n in sorted(names - specs.keys() - left_out)]

    # compare ranks
    theirs = _with_shapes(stored, specs, settings.load)
    if {axis for axis, _ in theirs.grid.axes} == {axis for axis, _ in mine.grid.axes}:
        axes = [" x ".join(f"{a} {n}" for a, n in s.grid.axes) for s in (theirs, mine)]
        if axes[0] != axes[1]:
            text = f"{settings.load}: its layouts are for {axes[0]}, but this plan has {axes[1]}"
            raise RequestError((Problem(KEY, text, _with_ranks(job, theirs)),))
    if theirs.grid.size != mine.grid.size:
        ranks = many(theirs.grid.size, "rank")
        text = f"{settings.load}: its layouts are for {ranks}, but this plan has {mine.grid.size}"
        raise RequestError((Problem(KEY, text, _with_ranks(job, theirs)),))
    _refuse(settings.load, [*_differences(mine, theirs), *absent])


def _with_ranks(job: Job, theirs: Strategy) -> str:
    """Returns a cure that sets the number of ranks, if the request leaves it open."""
    each, rest = divmod(theirs.grid.size, job.launch.nnodes)
    return f"launch.nproc={each}" if job.launch.nproc is None and not rest else ""


def _names(stored: Strategy | mindspore.StrategyFile) -> set[str]:
    """Returns the names of the model's tensors; optimizer states follow them."""
    if not isinstance(stored, Strategy):
        return mindspore.listed(stored)
    return {name for name, entry in stored.entries.items() if entry.kind != "optim"}


def _stored(path: Path) -> Strategy | mindspore.StrategyFile:
    """Reads either format. MindSpore's files end in .ckpt, or are JSON with a MindSpore key."""
    try:
        if path.suffix == ".ckpt" or (path.is_file() and b'"parallel_layout_item"' in read_bytes(path)):
            return mindspore.read_strategy(path)
        return load(path)
    except (RefusedFile, ValueError) as error:
        raise RequestError((Problem(KEY, str(error)),)) from error
    except OSError as error:
        text = f"{path}: cannot be read: {error.strerror}"
        raise RequestError((Problem(KEY, text),)) from error


def _with_shapes(
    stored: Strategy | mindspore.StrategyFile, specs: Mapping[str, TensorSpec], path: str
) -> Strategy:
    """Returns the stored strategy with the model's shapes where the file omits them."""
    try:
        known = _known(stored, specs.keys())
        return known if isinstance(known, Strategy) else mindspore.of_full_tensors(known, specs)
    except ValueError as error:
        raise RequestError((Problem(KEY, f"{path}: {error}"),)) from error


def _known(
    stored: Strategy | mindspore.StrategyFile, names: Collection[str]
) -> Strategy | mindspore.StrategyFile:
    return mindspore.only_names(stored, names) if not isinstance(stored, Strategy) else stored


def _sayable(strategy: Strategy, path: str) -> None:
    try:
        mindspore.merged_file(strategy)
    except ValueError as error:
        text = f"{path}: {error}; save it under a name that ends in .json"
        raise RequestError((Problem("parallel.param_strategy.save", text),)) from error


def _refuse(path: str, texts: Sequence[str]) -> None:
    """Raises ``RequestError`` with the first ``MOST_PROBLEMS`` problems, if there are any."""
    if not texts:
        return
    more = [f"and {len(texts) - MOST_PROBLEMS} more"] if len(texts) > MOST_PROBLEMS else []
    raise RequestError((Problem(KEY, f"{path}: {'; '.join([*texts[:MOST_PROBLEMS], *more])}"),))


def _differences(mine: Strategy, theirs: Strategy) -> Iterator[str]:
    """Yields tensors of both strategies whose layouts differ.

    If the grids are equal, it names the keys that differ.
    """
    for name, entry in mine.entries.items():
        first = theirs.named.get(name)
        stored = theirs.entries[first] if first is not None else None
        if stored is None or meaning(stored.layout) == meaning(entry.layout):
            continue
        a, b = row(stored), row(entry)
        unlike = [key for key in ("shape", "split", "at") if a[key] != b[key]]
        if stored.layout.grid != entry.layout.grid or not unlike:
            yield f"{name} is laid out differently"
        else:
            differences = ", ".join(
                f"{key} {json.dumps(a[key])}, in this plan {json.dumps(b[key])}" for key in unlike
            )
            yield f"{name} has {differences}"
