"""Whether the ties that a request lists are those that the model has."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from shlex import quote

from launcher.errors import Problem
from launcher.plan.partition.params import Placed

KEY = "parallel.shared"
Listed = tuple[tuple[str, ...], ...]


def check(listed: Listed, params: tuple[Placed, ...]) -> Iterator[Problem]:
    """A group must be all the names of one tensor: a list ties nothing and unties nothing, the model does.

    A tensor tied over several stages must be listed; one that is tied inside a stage may be.
    """
    first = {n: p for p in params for n in p.names}
    cure = _cure(params)
    for group in listed:
        if unknown := [n for n in group if n not in first]:
            close = get_close_matches(unknown[0], first, 1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            yield Problem(KEY, f"the model has no parameter {unknown[0]!r}{hint}", cure)
            continue
        tensors = {first[n].name: first[n] for n in group}
        if len(tensors) > 1:
            a, b, *_ = tensors
            text = f"{a} and {b} are two tensors; make them one in the model, as in b.weight = a.weight"
            yield Problem(KEY, text, cure)
        elif group and (missing := set(first[group[0]].names) - {*group}):
            names = first[group[0]].names
            text = f"{', '.join(group)}: the same tensor is {', '.join(n for n in names if n in missing)} too"
            yield Problem(KEY, text, cure)
    named = {n for group in listed for n in group}
    for p in params:
        if len(p.stages) > 1 and not p.buffer and named.isdisjoint(p.names):
            at = ", ".join(map(str, p.stages))
            yield Problem(KEY, f"{' = '.join(p.names)} is one tensor on stages {at}, and is not listed", cure)


def _cure(params: tuple[Placed, ...]) -> str:
    """The list that is right."""
    tied = [p.names for p in params if len(p.stages) > 1 and not p.buffer]
    return quote(f"{KEY}=[{','.join(f'[{chr(44).join(names)}]' for names in tied)}]") if tied else f"{KEY}=auto"
