"""Cures of an override that sets a group of keys: the whole of it, put right."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.errors import Problem
from launcher.job.cures.kept_meaning import settable
from launcher.job.overrides.grammar import OPEN, Override, parse, paste, shell
from launcher.job.schema.redact import text as redacted
from launcher.job.schema.redact import values
from launcher.job.yaml.origins import Origins


def whole(problems: Sequence[Problem], typed: Sequence[Override], origins: Origins) -> tuple[Problem, ...]:
    """``problems``, with cures that are the whole override where one that sets a group of keys is to blame."""
    blamed = {p: _blamed(p, typed, origins) for p in problems}
    cures = {
        o.text: _cure(o, [p for p in problems if blamed[p] is o], origins) for o in blamed.values() if o is not None
    }
    return tuple(replace(p, cure=cures[o.text]) if (o := blamed[p]) and p.cure else p for p in problems)


def _blamed(problem: Problem, typed: Sequence[Override], origins: Origins) -> Override | None:
    origin = origins.of(problem.key) if problem.key else None
    if origin is None or not origin.typed:
        return None
    groups = (o for o in typed if isinstance(o.value, Mapping) and _within(problem, o))
    return next((o for o in groups if redacted(o.text) == origin.text), None)


def _within(problem: Problem, group: Override) -> bool:
    """Whether it is about a key of ``group``, or a key that ``group`` lacks."""
    below = f"{group.key}."
    words = shlex.split(problem.cure)
    lacks = problem.key == group.key and bool(words) and all(w.startswith(below) for w in words)
    return lacks or problem.key.startswith(below)


def _cure(group: Override, problems: Sequence[Problem], origins: Origins) -> str:
    """``group`` with all that the cures of ``problems`` say."""
    tree = copy.deepcopy(group.value)
    beside: list[str] = []
    for problem in problems:
        if problem.cure and problem.key != group.key and not settable(problem.key.split("."), origins):
            _drop(tree, problem.key[len(group.key) + 1 :].split("."))
        for word in shlex.split(problem.cure):
            parsed = parse(word)
            inside = parsed.key_or_group.startswith(f"{group.key}.")
            parts = parsed.key_or_group[len(group.key) + 1 :].split(".")
            if inside and parsed.is_delete():
                _drop(tree, parts)
            elif inside:
                _set(tree, parts, parsed.value(), group.key in OPEN)
            else:
                beside.append(shell(word))
    hidden = values(tree, group.key) != tree
    return "" if hidden else " ".join([paste(group.key, tree), *beside])


def _drop(tree: dict[Any, Any], parts: Sequence[str]) -> None:
    n = _begun(tree, parts)
    if n == len(parts):
        del tree[".".join(parts)]
    elif n and isinstance(below := tree[".".join(parts[:n])], dict):
        _drop(below, parts[n:])


def _set(tree: dict[Any, Any], parts: Sequence[str], value: Any, dotted: bool) -> None:
    """``dotted``: dots belong to the names, where a new one is set."""
    n = _begun(tree, parts)
    if 0 < n < len(parts) and isinstance(below := tree[".".join(parts[:n])], dict):
        _set(below, parts[n:], value, dotted)
    elif n == len(parts) or dotted or len(parts) == 1:
        tree[".".join(parts)] = value
    else:
        tree[parts[0]] = {}
        _set(tree[parts[0]], parts[1:], value, dotted)


def _begun(tree: Mapping[Any, Any], parts: Sequence[str]) -> int:
    """How many of ``parts`` are a key of ``tree``, the most; 0 for none."""
    return next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in tree), 0)
