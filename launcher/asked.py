"""What the files say that a request names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.checkpoint.of_plan import of_plan
from launcher.checkpoint.strategy import Strategy, row
from launcher.checkpoint.strategy_file import load
from launcher.errors import Problem, RequestError
from launcher.job.schema import Job
from launcher.plan import speed_up
from launcher.plan.plan import Plan


def inlined(job: Job) -> tuple[Job, list[Problem]]:
    """``job`` with what its files say, and what is wrong with them; a file that is wrong says nothing."""
    path = job.parallel.transformer_opt
    if not isinstance(path, str):
        return job, []
    values, found = _switches(path)
    switches = speed_up.FromFile({} if found else values)
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"transformer_opt": switches})}), found


LAYOUTS = "parallel.param_strategy.load"
MOST = 3


def fits(job: Job, plan: Plan) -> None:
    """Raises ``RequestError`` unless the layouts of ``param_strategy.load`` are the plan's, tensor by tensor."""
    asked = job.parallel.param_strategy
    if asked.load is None:
        return
    mine = of_plan(plan, asked.only_trainable)
    try:
        theirs = load(Path(asked.load))
    except OSError as error:
        text = f"{asked.load}: cannot be read: {error.strerror}"
        raise RequestError((Problem(LAYOUTS, text, f"{LAYOUTS}=null"),)) from error
    except ValueError as error:
        raise RequestError((Problem(LAYOUTS, str(error), f"{LAYOUTS}=null"),)) from error
    if mine.grid != theirs.grid:
        axes = [" x ".join(f"{a} {n}" for a, n in s.grid.axes) for s in (theirs, mine)]
        text = f"{asked.load}: its layouts are on {axes[0]}, this plan is on {axes[1]}"
        raise RequestError((Problem(LAYOUTS, text, f"{LAYOUTS}=null"),))
    frozen = {n for p in plan.params if not p.trainable for n in p.names} if asked.only_trainable else set()
    if found := list(_differences(mine, theirs, frozen)):
        more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
        raise RequestError((Problem(LAYOUTS, f"{asked.load}: {'; '.join(found[:MOST] + more)}", f"{LAYOUTS}=null"),))


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
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text)
    except json.JSONDecodeError as error:
        return {}, [_file(f"{path}:{error.lineno}: no JSON: {error.msg}")]
    except UnicodeDecodeError:
        return {}, [_file(f"{path}: no JSON: it is not text")]
    except OSError as error:
        return {}, [_file(f"{path}: cannot be read: {error.strerror}")]
    if not isinstance(values, dict):
        return {}, [_file(f"{path}: should be an object: {{switch: value}}")]
    return values, list(speed_up.wrong(values, lambda name: f"{path}:{_line(text, name)}"))


def _file(text: str) -> Problem:
    return Problem(speed_up.KEY, text, f"{speed_up.KEY}=null")


def _line(text: str, name: str) -> int:
    """Where ``name`` is set last, for that is what counts."""
    spots = [m.start() for m in re.finditer(re.escape(json.dumps(name)) + r"\s*:", text)]
    return text.count("\n", 0, spots[-1]) + 1 if spots else 1
