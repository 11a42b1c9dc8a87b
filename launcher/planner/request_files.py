"""What the files say that a request names, and which torch is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.checkpoint.layout.canonical import meaning
from launcher.checkpoint.layout.derived import of_plan
from launcher.checkpoint.layout.strategy import Strategy, row
from launcher.checkpoint.layout.strategy_file import load
from launcher.checkpoint.mindspore.formats import StrategyFile, merged_file, read_strategy, to_strategy
from launcher.checkpoint.mindspore.formats.operator_json import is_mindspores
from launcher.checkpoint.mindspore.formats.operator_json import parse as node_strategies
from launcher.checkpoint.mindspore.operator_strategies import strategies
from launcher.checkpoint.mindspore.strategy_input import listed, only_names, whole_specs
from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.plan.operators.operator_file import parsed
from launcher.plan.operators.strategy import FromFile
from launcher.plan.plan import Plan
from launcher.plan.settings import transformer_opt
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.text import many
from launcher.untrusted.files import RefusedFile, read_bytes, read_json, read_text

OPERATORS = "parallel.operator_strategy.load"


def inlined(job: Job) -> tuple[Job, list[Problem]]:
    """``job`` with what its files say, and what is wrong with them; a file that is wrong says nothing."""
    par = job.parallel
    found: list[Problem] = []
    changes: dict[str, Any] = {}

    # switches
    switches = par.transformer_opt
    if isinstance(switches, str) and switches:  # "" is none, as MindSpore has it
        values, wrong = _switches(switches)
        changes["transformer_opt"] = transformer_opt.FromFile({} if wrong else values)
        found += wrong

    # operators, which the request may add to
    if par.operator_strategy.load is not None:
        got = _operators(par.operator_strategy.load)
        if isinstance(got, Problem):
            found.append(got)
        else:
            tp, operators = got
            changes["operators"] = operators | par.operators
            if par.grid.tp is None and tp is not None:
                changes["grid"] = par.grid.model_copy(update={"tp": tp})

    if not changes:
        return job, found
    return job.model_copy(update={"parallel": par.model_copy(update=changes)}), found


def _operators(path: str) -> tuple[int | None, dict[str, FromFile]] | Problem:
    """The operator strategies of a file, ours or MindSpore's."""
    values = _json(path)
    if isinstance(values, Unreadable):
        return _unread(OPERATORS, values)
    try:
        if is_mindspores(values):
            return None, strategies(node_strategies(values), OPERATORS, path)
        return parsed(values, OPERATORS, path)
    except ValueError as error:
        return _unread(OPERATORS, f"{path}: {error}")


LAYOUTS = "parallel.param_strategy.load"
MOST = 3


def fits(job: Job, plan: Plan) -> None:
    """Raises ``RequestError`` unless the layouts of ``param_strategy.load`` are the plan's, tensor by tensor.

    So it does where MindSpore's form cannot say what ``param_strategy.save`` is to have.
    """
    asked = job.parallel.param_strategy
    mine = of_plan(plan, asked.only_trainable)
    if asked.save is not None and asked.save.endswith(".ckpt"):
        _sayable(mine, asked.save)
    if asked.load is None:
        return

    # what the file has
    try:
        theirs = _stored(Path(asked.load))
    except (RefusedFile, ValueError) as error:
        raise RequestError((Problem(LAYOUTS, str(error)),)) from error
    except OSError as error:
        text = f"{asked.load}: cannot be read: {error.strerror}"
        raise RequestError((Problem(LAYOUTS, text),)) from error

    # against what the plan has
    if isinstance(theirs, StrategyFile):
        _fits_mindspores(mine, theirs, asked.load)
        return
    if mine.grid != theirs.grid:
        axes = [" x ".join(f"{a} {n}" for a, n in s.grid.axes) for s in (theirs, mine)]
        text = f"{asked.load}: its layouts are on {axes[0]}, this plan is on {axes[1]}"
        raise RequestError((Problem(LAYOUTS, text),))
    left_out = set[str]()
    if asked.only_trainable:
        left_out = {n for p in plan.params if not p.trainable for n in p.names}
    _refuse_differences(asked.load, list(_differences(mine, theirs, left_out)))


def _stored(path: Path) -> Strategy | StrategyFile:
    """Of either form: MindSpore's are called .ckpt, or are JSON that says what it holds."""
    if path.suffix == ".ckpt" or (path.is_file() and b'"parallel_layout_item"' in read_bytes(path)):
        return read_strategy(path)
    return load(path)


def _sayable(strategy: Strategy, path: str) -> None:
    try:
        merged_file(strategy)
    except ValueError as error:
        text = f"{path}: {error}; a name that ends in .json has place for it"
        raise RequestError((Problem("parallel.param_strategy.save", text),)) from error


def _fits_mindspores(mine: Strategy, file: StrategyFile, path: str) -> None:
    """The same of MindSpore's form, which has other names for the axes."""
    specs, names = whole_specs(mine), listed(file)

    # the same names
    found = [f"{n} is not in the file" for n in mine.entries if n not in names]
    found += [f"{n} is not in the model" for n in sorted(names - specs.keys())]

    # on as many ranks
    try:
        theirs = to_strategy(_known(file, specs), specs)
    except ValueError as error:
        raise RequestError((Problem(LAYOUTS, f"{path}: {error}"),)) from error
    if theirs.grid.size != mine.grid.size:
        ranks = many(theirs.grid.size, "rank")
        text = f"{path}: its layouts are on {ranks}, this plan is on {mine.grid.size}"
        raise RequestError((Problem(LAYOUTS, text),))

    # in layouts that mean the same
    for name, entry in theirs.entries.items():
        if name in mine.entries and meaning(entry.layout) != meaning(mine.entries[name].layout):
            found.append(f"{name} is laid out in another way")
    _refuse_differences(path, found)


def _refuse_differences(path: str, found: Sequence[str]) -> None:
    """Raises ``RequestError`` with the first of them, if there are any."""
    if not found:
        return
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    raise RequestError((Problem(LAYOUTS, f"{path}: {'; '.join([*found[:MOST], *more])}"),))


def _known(file: StrategyFile, specs: Mapping[str, TensorSpec]) -> StrategyFile:
    kept = only_names(file, specs.keys())
    assert isinstance(kept, StrategyFile)
    return kept


def _differences(mine: Strategy, theirs: Strategy, left_out: set[str]) -> Iterator[str]:
    for name, entry in mine.entries.items():
        there = theirs.entries.get(name)
        if there is None:
            yield f"{name} is not in the file"
        elif row(there) != row(entry):
            a, b = row(there), row(entry)
            unlike = [key for key in b if a[key] != b[key]]
            said = ", ".join(f"{key} {json.dumps(a[key])}, here {json.dumps(b[key])}" for key in unlike)
            yield f"{name} has {said}"
    for name in sorted(theirs.entries.keys() - mine.entries.keys() - left_out):
        yield f"{name} is not in the model"


def _switches(path: str) -> tuple[dict[str, Any], list[Problem]]:
    """The switches of a ``parallel_speed_up.json``."""
    values = _json(path)
    if isinstance(values, Unreadable):
        return {}, [_unread(transformer_opt.KEY, values)]
    if not isinstance(values, dict):
        return {}, [_unread(transformer_opt.KEY, f"{path}: should be an object: {{switch: value}}")]
    text = read_text(path)
    return values, list(transformer_opt.wrong(values, lambda name: f"{path}:{_line(text, name)}"))


class Unreadable(str):
    """Why a file cannot be read."""


def _json(path: str) -> Any:
    """What the file holds, or why it cannot be read."""
    try:
        return read_json(path)
    except json.JSONDecodeError as error:
        return Unreadable(f"{path}:{error.lineno}: no JSON: {error.msg}")
    except UnicodeDecodeError:
        return Unreadable(f"{path}: no JSON: it is not text")
    except RefusedFile as error:
        return Unreadable(str(error))
    except OSError as error:
        return Unreadable(f"{path}: cannot be read: {error.strerror}")


def _unread(key: str, why: str) -> Problem:
    return Problem(key, why)


def _line(text: str, name: str) -> int:
    """Where ``name`` is set last, for that is what counts."""
    spots = [m.start() for m in re.finditer(re.escape(json.dumps(name)) + r"\s*:", text)]
    return text.count("\n", 0, spots[-1]) + 1 if spots else 1
