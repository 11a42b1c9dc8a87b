"""Files that a request wants written beside its run: layouts and groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.checkpoint.durable import write_text
from launcher.checkpoint.keys import is_place, load_key
from launcher.checkpoint.of_plan import of_plan
from launcher.checkpoint.strategy_file import text
from launcher.errors import Problem
from launcher.job.inside import RUN, place
from launcher.job.schema import Job
from launcher.plan import operator_file, peers
from launcher.plan.plan import Plan
from launcher.runtime import folder


def unwritable(job: Job) -> list[Problem]:
    """What would keep them from being written; writes nothing."""
    named = [(key, path) for key, path in _named(job) if not path.startswith(RUN)]
    found = [_unwritable(key, Path(path)) for key, path in named]
    dump = job.parallel.local_norm.dump
    found += _twice([*_named(job), *([("parallel.local_norm.dump", dump)] if dump is not None else [])])
    if dump is not None and not dump.startswith(RUN):
        found.append(folder.check_writable(Path(dump), "parallel.local_norm.dump", "the folder of norms"))
    if (place := job.checkpoint.encrypt) is not None and is_place(place):
        found.append(_no_key(place))
    return [p for p in found if p is not None]


def _no_key(place: str) -> Problem | None:
    try:
        load_key(place)
    except ValueError as error:
        return Problem("checkpoint.encrypt", str(error))
    return None


def _unwritable(key: str, path: Path) -> Problem | None:
    if path.is_dir():
        return Problem(key, f"{path}: is a folder, not a file")
    return folder.check_writable(path.parent, key, "the folder of this file")


def _twice(named: list[tuple[str, str]]) -> Iterator[Problem]:
    """One file cannot be two."""
    for i, (key, path) in enumerate(named):
        if other := next((k for k, p in named[:i] if p == path), None):
            yield Problem(key, f"{path}: {other} is written there too")


def _named(job: Job) -> Iterator[tuple[str, str]]:
    par = job.parallel
    for key, path in (
        ("param_strategy.save", par.param_strategy.save),
        ("operator_strategy.save", par.operator_strategy.save),
        ("group_file", par.group_file),
    ):
        if path is not None:
            yield f"parallel.{key}", path


def write(job: Job, plan: Plan, run: Path) -> None:
    """Before the first step, each in one piece."""
    par = job.parallel
    if par.param_strategy.save is not None:
        strategy = of_plan(plan, par.param_strategy.only_trainable)
        _write(par.param_strategy.save, run, text(strategy, tuple(range(strategy.stages))))
    if par.operator_strategy.save is not None:
        _write(par.operator_strategy.save, run, operator_file.as_json(plan))
    if par.group_file is not None:
        _write(par.group_file, run, peers.as_json(plan))


def _write(path: str, run: Path, content: str) -> None:
    file = Path(place(path, str(run)))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, content)
