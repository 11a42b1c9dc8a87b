"""Writes the files that a request names in addition to its run: layouts and groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.layout.strategy import Strategy, stages
from launcher.checkpoint.layout.strategy_file import text
from launcher.checkpoint.tensorfile.disk import write_bytes
from launcher.checkpoint.tensorfile.encryption import is_place, load_key
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.paths import RUN, place
from launcher.optional import matrices, mindspore
from launcher.plan.cut.stages import covers
from launcher.plan.plan import Plan
from launcher.plan.tensor_parallel import operator_strategy_file
from launcher.run import rank_groups
from launcher.runtime import run_folder


def unwritable(job: Job) -> list[Problem]:
    """Returns problems that would keep the files from being written; writes nothing."""
    named = [(key, path) for key, path in _named(job) if not path.startswith(RUN)]
    problems = [run_folder.check_file(Path(path), key) for key, path in named]
    dump = job.parallel.local_norm.dump
    problems += _twice([*_named(job), *([("parallel.local_norm.dump", dump)] if dump is not None else [])])
    if dump is not None and not dump.startswith(RUN):
        problems.append(
            run_folder.check_writable(Path(dump), "parallel.local_norm.dump", "the folder of norms")
        )
    if (place := job.checkpoint.encrypt) is not None and is_place(place):
        problems.append(_no_key(place))
    return [p for p in problems if p is not None]


def _no_key(place: str) -> Problem | None:
    try:
        load_key(place)
    except ValueError as error:
        return Problem("checkpoint.encrypt", str(error))
    return None


def _twice(named: list[tuple[str, str]]) -> Iterator[Problem]:
    """Yields problems of two settings with the same file."""
    for i, (key, path) in enumerate(named):
        if other := next((k for k, p in named[:i] if p == path), None):
            yield Problem(key, f"{path}: {other} is also written to this file")


def _named(job: Job) -> Iterator[tuple[str, str]]:
    par = job.parallel
    paths = {
        "param_strategy.save": par.param_strategy.save,
        "operator_strategy.save": par.operator_strategy.save,
        "group_file": par.group_file,
    }
    for key, path in paths.items():
        if path is not None:
            yield f"parallel.{key}", path


def write(job: Job, plan: Plan, run: Path) -> None:
    """Writes the files, each atomically, before the first step."""
    par = job.parallel
    if (path := par.param_strategy.save) is not None:
        strategy = strategy_of_plan(plan, par.param_strategy.only_trainable)
        for name, rank in _each(path, plan):
            stage = None if rank is None else plan.sizes.grid.coords(rank)["pp"]
            _write(name, run, _layouts(strategy, stage, path))
    if par.operator_strategy.save is not None:
        _write(par.operator_strategy.save, run, _operators(plan, par.operator_strategy.save))
    if (path := par.group_file) is not None:
        for name, rank in _each(path, plan):
            _write(name, run, _group_file(plan, rank, path))


def write_lost(job: Job, plan: Plan, run: Path) -> list[Path]:
    """Writes the files again if any of a finished run has been deleted; returns those."""
    named = [name for _, path in _named(job) for name, _ in _each(path, plan)]
    lost = [file for name in named if not os.path.lexists(file := Path(place(name, str(run))))]
    if lost:
        write(job, plan, run)
    return lost


RANK = "{rank}"
MINDSPORES_JSON = ".ms.json"


def _each(path: str, plan: Plan) -> Iterator[tuple[str, int | None]]:
    """Yields one file per rank if the name contains ``RANK``, as in AutoParallel; else one for all ranks."""
    if RANK not in path:
        yield path, None
    else:
        yield from ((path.replace(RANK, str(rank)), rank) for rank in range(plan.sizes.grid.size))


def _mindspores(path: str) -> bool:
    """Returns true if the file's name requests MindSpore's format."""
    return path.endswith(".ckpt")


def _layouts(strategy: Strategy, stage: int | None, path: str) -> bytes:
    """Returns the layouts of one stage, or of all stages."""
    if _mindspores(path):
        file = mindspore.merged_file(strategy) if stage is None else mindspore.stage_files(strategy)[stage]
        return mindspore.strategy_text(file, "protobuf")
    if stage is None:
        return text(strategy, tuple(range(strategy.stages))).encode()
    entries = {n: e for n, e in strategy.entries.items() if stage in stages(e.layout)}
    return text(Strategy(strategy.grid, entries), (stage,)).encode()


def _operators(plan: Plan, path: str) -> bytes:
    """Returns the operator strategies, in MindSpore's format for names that end in ``.ms.json``."""
    tp = plan.sizes.grid["tp"]
    if plan.sharding is not None:
        if path.endswith(MINDSPORES_JSON):
            return mindspore.node_text(
                mindspore.of_sharding(plan.sharding, lambda stage: plan.sizes.places[stage])
            )
        return matrices.operators_json(plan.sharding).encode()
    if not path.endswith(MINDSPORES_JSON):
        return operator_strategy_file.as_json(plan.operators, tp).encode()

    def stage_of(module: str) -> int:
        inside = (s.index for s in plan.stages if any(covers(m, module) for m in s.modules))
        return plan.sizes.places[next(inside, 0)]

    return mindspore.node_text(mindspore.of_flow(plan.operators, plan.sizes.replicas, tp, stage_of))


def _group_file(plan: Plan, rank: int | None, path: str) -> bytes:
    if _mindspores(path):
        return mindspore.groups_text(_groups(plan, rank))
    return rank_groups.as_json(plan.sizes.grid, plan.ties, plan.params).encode()


def _groups(plan: Plan, rank: int | None) -> mindspore.GroupFile:
    """Returns the groups of ``rank`` (or of all ranks).

    Also returns the ranks from which it (or rank 0) can restore.
    """
    groups = rank_groups.groups(plan.sizes.grid, plan.ties)
    rank_sets = (ranks for group in groups for ranks in group.ranks if len(ranks) > 1)
    named = {f"{len(ranks)}-{xxhash.xxh3_64_intdigest(repr(ranks).encode())}": ranks for ranks in rank_sets}
    mine = {name: ranks for name, ranks in named.items() if rank is None or rank in ranks}
    alike = rank_groups.alike(plan.sizes.grid, plan.params)
    return mindspore.GroupFile(mine, next(same for same in alike if (rank or 0) in same))


def _write(path: str, run: Path, content: bytes) -> None:
    file = Path(place(path, str(run)))
    make_folder(file.parent)
    write_bytes(file, content)
