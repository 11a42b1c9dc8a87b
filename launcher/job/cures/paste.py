"""Writes cures that can be pasted into a command line or a file."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from launcher.errors import Problem
from launcher.job.cures.keeps_meaning import overlap, settable, settings
from launcher.job.origins import Origin, Origins
from launcher.job.overrides import OPEN, Override, parsable, parse, paste, shell
from launcher.job.schema.redact import text as redacted
from launcher.job.schema.redact import values


def pasted(words: Sequence[str], problem: Problem, origins: Origins) -> tuple[str, ...]:
    """Returns ``words`` with the cure in place of the words at fault, or at the end if a file is at fault."""
    new = shlex.split(problem.cure)
    start, taken = _place(words, problem, origins)
    if start is None:
        return (*words, *(w for w in new if w not in words))
    return (*words[:start], *new, *words[start + taken :])


def with_placeholder(words: Sequence[str], problem: Problem, origins: Origins) -> tuple[str, ...]:
    """Pastes as ``pasted`` does, but keeps a word that sets other keys too: a group, or neighboring keys."""
    start, taken = _place(words, problem, origins)
    if not problem.cure or start is None or taken != 1 or not parsable(words[start]):
        return pasted(words, problem, origins)
    own = parse(words[start]).key_or_group
    if problem.key.startswith(f"{own}.") or not overlap(problem.key, own):
        problem = replace(problem, cure=f"{shell(words[start])} {problem.cure}")
    return pasted(words, problem, origins)


def _place(words: Sequence[str], problem: Problem, origins: Origins) -> tuple[int | None, int]:
    """Returns the index of the first of the words that caused the problem, and their number.

    If they occur more than once, the last place counts, as for overrides.
    """
    taken = len(problem.words)
    if taken:
        starts = [i for i in range(len(words)) if tuple(words[i : i + taken]) == problem.words]
        return (starts[-1] if starts else None), taken
    origin = typed_origin(problem, origins)
    if origin is None:
        return None, 0
    starts = [i for i, word in enumerate(words) if redacted(word) == origin.text]
    return (starts[-1] if starts else None), 1


def typed_origin(problem: Problem, origins: Origins) -> Origin | None:
    """Returns the override that set the key of ``problem``; ``None`` if a file set it or nothing did."""
    origin = origins.of(problem.key) if problem.key else None
    return origin if origin is not None and origin.typed else None


def with_override(problem: Problem, origins: Origins) -> Problem:
    """Adds the override at fault to a cure that only sets other keys and would replace the override."""
    origin = typed_origin(problem, origins)
    if not problem.cure or origin is None or problem.words:
        return problem

    # not if the cure contains the override or a flag, or if the override cannot be parsed
    words = shlex.split(problem.cure)
    if any(w.startswith("-") for w in words) or origin.text in words or not parsable(origin.text):
        return problem

    # not if the cure replaces the key itself
    own = parse(origin.text).key_or_group
    if not settable(_above_items(problem.key), origins) or any(own.startswith(f"{node}.") for node in OPEN):
        return problem
    if any(overlap(key, own) for key, _ in settings(words)):
        return problem
    return replace(problem, cure=f"{shell(origin.text)} {problem.cure}")


def _above_items(key: str) -> list[str]:
    """Returns the parts of ``key`` down to the first list.

    For ``callbacks.0._target_`` that is ``callbacks``.
    """
    return list(takewhile(lambda part: not part.isdecimal(), key.split(".")))


def swept(problem: Problem, origins: Origins, words: Sequence[str]) -> Problem:
    """Returns the ``problem`` of one cell of a sweep, with a cure that does not change the other cells."""
    origin = typed_origin(problem, origins)
    if not problem.cure or origin is None or origin.text in map(redacted, words):
        return problem

    # replace the bad value among the values of the swept word
    name, _, bad = origin.text.partition("=")
    right = shlex.split(problem.cure)
    for word in words:
        key, _, values = word.partition("=")
        items = [v.strip() for v in values.split(",")]
        if key == name and bad in items and len(right) == 1 and right[0].startswith(f"{name}="):
            value = right[0].partition("=")[2]
            good = ",".join(dict.fromkeys(value if item == bad else item for item in items))
            return replace(problem, cure=shell(f"{name}={good}"), words=(word,))

    # any other cure would change all cells
    return replace(problem, cure="")


def with_group_cures(
    problems: Sequence[Problem], typed: Sequence[Override], origins: Origins
) -> tuple[Problem, ...]:
    """Makes the corrected override the cure of each problem that an override of a group of keys caused."""
    blamed = {p: _blamed(p, typed, origins) for p in problems}
    cures: dict[str, str] = {}
    for group in blamed.values():
        if group is not None:
            cures[group.text] = _cure(group, [p for p in problems if blamed[p] is group], origins)
    out = []
    for problem in problems:
        group = blamed[problem]
        out.append(replace(problem, cure=cures[group.text]) if group and problem.cure else problem)
    return tuple(out)


def _blamed(problem: Problem, typed: Sequence[Override], origins: Origins) -> Override | None:
    """Returns the override of a group of keys that set the key of ``problem``; ``None`` if none did."""
    origin = origins.of(problem.key) if problem.key else None
    if origin is None or not origin.typed:
        return None
    groups = (o for o in typed if isinstance(o.value, Mapping) and _within(problem, o))
    return next((o for o in groups if redacted(o.text) == origin.text), None)


def _within(problem: Problem, group: Override) -> bool:
    """Returns true if ``problem`` is about a key of ``group``, or about one that is missing from it."""
    below = f"{group.key}."
    words = shlex.split(problem.cure)
    lacks = problem.key == group.key and bool(words) and all(w.startswith(below) for w in words)
    return lacks or problem.key.startswith(below)


def _cure(group: Override, problems: Sequence[Problem], origins: Origins) -> str:
    """Returns ``group`` with the cures of ``problems`` applied; overrides of other keys follow it."""
    tree = copy.deepcopy(group.value)
    above = f"{group.key}."
    beside: list[str] = []
    for problem in problems:
        elsewhere = not any(overlap(key, problem.key) for key, _ in settings(shlex.split(problem.cure)))
        unknown = not settable(problem.key.split("."), origins)
        if problem.cure and problem.key != group.key and unknown and elsewhere:
            _drop(tree, problem.key.removeprefix(above).split("."))

        # what a cure sets below the group becomes part of the group
        for word in shlex.split(problem.cure):
            parsed = parse(word)
            inside = parsed.key_or_group.startswith(above)
            parts = parsed.key_or_group.removeprefix(above).split(".")
            if inside and parsed.is_delete():
                _drop(tree, parts)
            elif inside:
                _set(tree, parts, parsed.value(), group.key in OPEN)
            else:
                beside.append(shell(word))

    # a secret would be pasted as asterisks
    hidden = values(tree, group.key) != tree
    return "" if hidden else " ".join([paste(group.key, tree), *beside])


def _drop(tree: dict[Any, Any], parts: Sequence[str]) -> None:
    n = _longest_key(tree, parts)
    if n == len(parts):
        del tree[".".join(parts)]
        return
    below = tree[".".join(parts[:n])] if n else None
    if isinstance(below, dict):
        _drop(below, parts[n:])


def _set(tree: dict[Any, Any], parts: Sequence[str], value: Any, dotted: bool) -> None:
    """Sets a value. ``dotted``: a new key may contain dots."""
    n = _longest_key(tree, parts)
    below = tree[".".join(parts[:n])] if 0 < n < len(parts) else None
    if isinstance(below, dict):
        _set(below, parts[n:], value, dotted)
    elif n == len(parts) or dotted or len(parts) == 1:
        tree[".".join(parts)] = value
    else:
        tree[parts[0]] = {}
        _set(tree[parts[0]], parts[1:], value, dotted)


def _longest_key(tree: Mapping[Any, Any], parts: Sequence[str]) -> int:
    """Returns the largest number of first ``parts`` that, joined by dots, are a key of ``tree``.

    It is 0 if none are.
    """
    return next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in tree), 0)
