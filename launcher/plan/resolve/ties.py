"""``parallel.shared``: whether the ties that a request lists are those of the model."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.did_you_mean import did_you_mean
from launcher.job.schema.job import Job
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.values.setting import Setting

KEY = "parallel.shared"


def param_problems(job: Job, params: tuple[Placed, ...]) -> Iterator[Problem]:
    """Yields a problem for each group that is not all the names of one tensor, and for each missing tie.

    The setting only states the ties of the model; it cannot make or remove one. A tensor that is tied over
    several stages must be listed; one that is tied inside of a stage may be.
    """
    listed = job.parallel.shared
    if listed == "auto":
        return
    cure = _cure(params)
    of = {name: param for param in params for name in param.names}
    for group in listed:
        text = _wrong(group, of)
        if text:
            yield Problem(KEY, text, cure)

    named = {name for group in listed for name in group}
    for param in _tied(params):
        if named.isdisjoint(param.names):
            at = ", ".join(map(str, param.stages))
            text = f"{' = '.join(param.names)} is one tensor on stages {at}, but is not listed"
            yield Problem(KEY, text, cure)


def _wrong(group: tuple[str, ...], of: dict[str, Placed]) -> str:
    """Returns why ``group`` is not all the names of one tensor; ``of`` maps names to parameters."""
    for name in group:
        if name not in of:
            close = get_close_matches(name, of, 1)
            hint = did_you_mean(close[0] if close else None)
            return f"the model has no parameter {name!r}{hint}"

    tensors = list(dict.fromkeys(of[name].name for name in group))
    if len(tensors) > 1:
        a, b = tensors[:2]
        return f"{a} and {b} are two tensors; make them one in the model, as in b.weight = a.weight"

    missing = [name for name in of[group[0]].names if name not in group] if group else []
    if missing:
        return f"{', '.join(group)}: this tensor is also named {', '.join(missing)}"
    return ""


def _tied(params: tuple[Placed, ...]) -> list[Placed]:
    """Returns the parameters that are on several stages."""
    return [p for p in params if len(p.stages) > 1 and not p.buffer]


def _cure(params: tuple[Placed, ...]) -> str:
    """Returns the override with the correct list."""
    groups = ["[" + ",".join(p.names) + "]" for p in _tied(params)]
    return quote(f"{KEY}=[{','.join(groups)}]") if groups else f"{KEY}=auto"


def rows(job: Job) -> Iterator[Setting]:
    """Yields the listed ties; they match the model, or the request would have been refused."""
    listed = job.parallel.shared
    if listed != "auto":
        groups = ", ".join("=".join(names) for names in listed) or "none"
        yield Setting(KEY, groups, "satisfied", "these are the ties of the model")
