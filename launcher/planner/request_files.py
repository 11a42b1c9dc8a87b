"""Reads the files that a request names."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from launcher.errors import Problem
from launcher.optional import mindspore
from launcher.plan.resolve import transformer_opt
from launcher.plan.resolve.device_matrix import choose_engine
from launcher.plan.tensor_parallel.operator_strategy_file import Searched, parsed, searched
from launcher.plan.values.resolved import EngineChoice, Origins, Resolved, SwitchesFile
from launcher.planner.loaded_param_layouts import TP_KEY, degrees
from launcher.untrusted.files import RefusedFile, read_json, read_text

OPERATORS = "parallel.operator_strategy.load"


def inlined(resolved: Resolved) -> tuple[Resolved, list[Problem]]:
    """Returns the request with the content of its files, and their problems.

    An invalid file contributes nothing.
    """
    job = resolved.job
    par = job.parallel
    problems: list[Problem] = []
    changes: dict[str, Any] = {}

    # switches
    file, typed = transformer_opt.file_of(job)
    if file:  # "" means none, as in MindSpore
        values, wrong = _switches(file)
        changes["transformer_opt"] = {**({} if wrong else values), **typed}
        resolved = replace(resolved, switches_file=SwitchesFile(file, frozenset(typed)))
        problems += wrong

    # operator strategies, which the request may extend
    if par.operator_strategy.load is not None:
        got = _operators(par.operator_strategy.load)
        if isinstance(got, Problem):
            problems.append(got)
        else:
            tp, operators, origins, found_by = got
            changes["operators"] = operators | par.operators
            origins = {key: origin for key, origin in origins.items() if key not in par.operators}
            resolved = replace(resolved, strategies=origins)
            if found_by is not None:
                resolved = replace(resolved, search_reasons=found_by.reasons)
            if par.grid.tp is None and tp is not None:
                changes["grid"] = par.grid.model_copy(update={"tp": tp})

    # what cuts the operators, unless another plan has decided it
    engine = resolved.engine
    if engine is None:
        engine = choose_engine(job.model_copy(update={"parallel": par.model_copy(update=changes)}))

    # parameter layouts, which operators and hsdp follow
    if par.param_strategy.load is not None:
        tp_from = OPERATORS if par.grid.tp is None else TP_KEY
        so_far = par.model_copy(update=changes)
        more, ranks, wrong = degrees(so_far, tp_from, apart=engine.over_matrices)
        if ranks is not None:
            why = engine.why or "the layouts of a file fit no tp axis"
            engine = EngineChoice("device_matrix", why, ranks_at_least=ranks)
        changes |= more
        problems += wrong
        resolved = replace(resolved, threshold_from_file="hsdp" in more)

    resolved = replace(resolved, engine=engine)
    if not changes:
        return resolved, problems
    return resolved.with_job(job.model_copy(update={"parallel": par.model_copy(update=changes)})), problems


def _operators(path: str) -> tuple[int | None, dict[str, Any], Origins, Searched | None] | Problem:
    """Returns the content of a file of operator strategies, or why it cannot be read.

    The content is ``tp``, the strategies, their origins, and the reasons of the search.
    """
    values = _json(path)
    if isinstance(values, Unreadable):
        return _unread(OPERATORS, values.why)
    try:
        if isinstance(values, dict) and "format" not in values and mindspore.is_mindspores(values):
            return None, *mindspore.strategies(mindspore.node_strategies(values), OPERATORS, path), None
        return *parsed(values, OPERATORS, path), searched(values)
    except ValueError as error:
        return _unread(OPERATORS, f"{path}: {error}")


def _switches(path: str) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the switches of a ``parallel_speed_up.json``."""
    values = _json(path)
    if isinstance(values, Unreadable):
        return {}, [_unread(transformer_opt.KEY, values.why)]
    if not isinstance(values, dict):
        return {}, [_unread(transformer_opt.KEY, f"{path}: should be an object: {{switch: value}}")]
    text = read_text(path)
    return values, list(transformer_opt.wrong(values, lambda name: f"{path}:{_line(text, name)}"))


@dataclass(frozen=True)
class Unreadable:
    """A file that cannot be read, and the reason."""

    why: str


def _json(path: str) -> Any:
    """Returns the content of a JSON file, or why it cannot be read."""
    try:
        return read_json(path)
    except json.JSONDecodeError as error:
        return Unreadable(f"{path}:{error.lineno}: not JSON: {error.msg}")
    except UnicodeDecodeError:
        return Unreadable(f"{path}: not JSON: it is not text")
    except RefusedFile as error:
        return Unreadable(str(error))
    except OSError as error:
        return Unreadable(f"{path}: cannot be read: {error.strerror}")


def _unread(key: str, why: str) -> Problem:
    return Problem(key, why)


def _line(text: str, name: str) -> int:
    """Returns the line that sets ``name`` last, as the last one takes effect."""
    spots = [m.start() for m in re.finditer(re.escape(json.dumps(name)) + r"\s*:", text)]
    return text.count("\n", 0, spots[-1]) + 1 if spots else 1
