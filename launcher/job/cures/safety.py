"""What a cure does to a command line: in whose place it is pasted, and whether what was asked for is still there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from launcher.errors import Problem
from launcher.job.overrides.grammar import OPEN, parsable, parse, shell
from launcher.job.schema import schema_keys
from launcher.job.schema.redact import text as redacted
from launcher.job.schema.similar_names import nearest
from launcher.job.yaml.origins import Origin, Origins

SOURCES = {"train", "load", "import"}
"""Steps that give a model weights that are worth a file."""


def pasted(words: Sequence[str], problem: Problem, origins: Origins) -> tuple[str, ...]:
    """``words`` with the cure in the place of what is to blame; added, where a file is."""
    new = shlex.split(problem.cure)
    spot, taken = _place(words, problem, origins)
    if spot is None:
        return (*words, *(w for w in new if w not in words))
    return (*words[:spot], *new, *words[spot + taken :])


def _place(words: Sequence[str], problem: Problem, origins: Origins) -> tuple[int | None, int]:
    if taken := len(problem.words):
        spots = [i for i in range(len(words)) if tuple(words[i : i + taken]) == problem.words]
        return (spots[-1] if spots else None), taken
    origin = origins.of(problem.key) if problem.key else None
    if origin is None or not origin.typed:
        return None, 0
    return next((i for i in range(len(words) - 1, -1, -1) if redacted(words[i]) == origin.text), None), 1


def whole_override(problem: Problem, origins: Origins) -> Problem:
    """``problem`` with a cure that says again what it would replace and does not change."""
    origin = origins.of(problem.key) if problem.key else None
    if not problem.cure or origin is None or not origin.typed or problem.words:
        return problem
    words = shlex.split(problem.cure)
    if any(w.startswith("-") for w in words) or origin.text in words or not parsable(origin.text):
        return problem
    own = parse(origin.text).key_or_group
    parts = problem.key.split(".")
    if (
        not settable(parts, origins)
        or any(own.startswith(f"{n}.") for n in OPEN)
        or any(_covers(key, own) for key, _ in _settings(words))
    ):
        return problem
    return replace(problem, cure=f"{shell(origin.text)} {problem.cure}")


def swept(problem: Problem, origins: Origins, words: Sequence[str]) -> Problem:
    """``problem`` of a cell of a sweep, with a cure that leaves the other cells as they are."""
    origin = origins.of(problem.key) if problem.key else None
    if not problem.cure or origin is None or not origin.typed or origin.text in map(redacted, words):
        return problem
    name, _, bad = origin.text.partition("=")
    right = shlex.split(problem.cure)
    for word in words:
        key, _, values = word.partition("=")
        items = [v.strip() for v in values.split(",")]
        if key == name and bad in items and len(right) == 1 and right[0].startswith(f"{name}="):
            good = ",".join(dict.fromkeys(right[0].partition("=")[2] if item == bad else item for item in items))
            return replace(problem, cure=shell(f"{name}={good}"), words=(word,))
    return replace(problem, cure="")


def settable(parts: Sequence[str], origins: Origins) -> bool:
    """Whether there is such a key, for what is chosen."""
    note = schema_keys.at(parts, origins.data)
    choice = bool(schema_keys.kinds(note)) if note is not None else False
    return note is not None and not (choice and schema_keys.settings(note, origins.value(".".join(parts))) is None)


def _covers(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def kept(problem: Problem, origins: Origins, late: bool) -> bool:
    """Whether its cure leaves what the user has set, or goes to the nearest that can be.

    A value that is right by itself and not with others is changed for nobody: which of them was meant is not known.
    Not ``late``, the value of the key itself is read as what it was meant to be, and an unknown key goes elsewhere.
    """
    settings = list(_settings(shlex.split(problem.cure)))
    if not late:
        parts = problem.key.split(".")
        read = not problem.key or not settable(parts, origins)
        settings = [] if read else [(k, v) for k, v in settings if not _covers(k, problem.key)]
    return all(_kept(key, value, problem, origins) for key, value in settings)


def _settings(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for word in words:
        if "=" in word or word.startswith("~"):
            parsed = parse(word)
            yield from _leaves(parsed.key_or_group, None if parsed.is_delete() else parsed.value())


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below)
    else:
        yield key, value


def _kept(key: str, new: Any, problem: Problem, origins: Origins) -> bool:
    old = origins.value(key)
    if old is None or old == new or not _own(key, origins):
        return True
    if key == "steps" and isinstance(old, dict) and isinstance(new, list):
        added = set(new) - set(old)
        return set(old) <= set(new) and (not added or bool(SOURCES & set(old)))
    if isinstance(old, bool) or isinstance(new, bool) or new is None:
        return False
    if isinstance(old, int | float) and isinstance(new, int | float):
        return old / 2 <= new <= old * 2 and new != 1
    if isinstance(old, str) and isinstance(new, str):
        known = old in schema_keys.literals(schema_keys.at(key.split("."), origins.data))
        return not known and nearest(old, [new]) is not None
    return isinstance(old, list | tuple) and isinstance(new, list | tuple)


def _own(key: str, origins: Origins) -> bool:
    """Whether the user has set ``key``, or something below it."""
    places = (*origins.all(key)[-1:], *(p[-1] for k, p in origins.places.items() if k.startswith(f"{key}.")))
    return any(_users(p) for p in places)


def _users(place: Origin) -> bool:
    return place.typed or not place.shipped
