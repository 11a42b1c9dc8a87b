"""Decides whether a cure keeps what the user meant."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.errors import Problem
from launcher.job.origins import Origins
from launcher.job.overrides import parse
from launcher.job.schema import keys
from launcher.job.schema.did_you_mean import nearest

WEIGHT_SOURCES = {"train", "load", "import"}
"""The steps that give a model weights worth saving."""


def kept(problem: Problem, origins: Origins, late: bool) -> bool:
    """Returns true if the cure keeps what the user has set, or moves it to the nearest possible value.

    ``late``: each value is valid by itself but conflicts with others. Then none of them may change, because
    the user may mean any of them. Otherwise a cure may set the key itself to a new value, or move an unknown
    key elsewhere.
    """
    changes = list(settings(shlex.split(problem.cure)))
    if any(_replaces_another_word(key, value, problem, origins) for key, value in changes):
        return False
    if not late:
        if not problem.key:
            return True
        if not settable(problem.key.split("."), origins):
            return not any(
                key == "recipe" and _typed_otherwise(key, value, origins) for key, value in changes
            )
        changes = [(key, value) for key, value in changes if not overlap(key, problem.key)]
    return all(_kept(key, value, origins) for key, value in changes)


def _replaces_another_word(key: str, new: Any, problem: Problem, origins: Origins) -> bool:
    """Returns true if ``key`` is below ``problem.key`` and another override sets it to another value."""
    own = origins.of(problem.key)
    typed = [place for place in origins.all(key)[-1:] if place.typed]
    other = bool(typed) and (own is None or typed[0].text != own.text)
    return other and key.startswith(f"{problem.key}.") and origins.value(key) not in (new, None)


def _typed_otherwise(key: str, new: Any, origins: Origins) -> bool:
    """Returns true if the command line sets ``key`` to another value."""
    origin = origins.of(key)
    return origin is not None and origin.typed and origins.value(key) != new


def settable(parts: Sequence[str], origins: Origins) -> bool:
    """Returns true if the schema has this key for the chosen model, data set, optimizer and steps.

    Below a user's own class any key is an argument.
    """
    note = keys.at(parts, origins.data)
    if note is None:
        above = (origins.value(".".join(parts[:n])) for n in range(1, len(parts)))
        return any(isinstance(node, Mapping) and "_target_" in node for node in above)
    is_choice = bool(keys.kinds(note))
    return not is_choice or keys.settings(note, origins.value(".".join(parts))) is not None


def overlap(key: str, other: str) -> bool:
    """Returns true if the keys are equal, or one is below the other."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def _kept(key: str, new: Any, origins: Origins) -> bool:
    """Returns true if ``new`` preserves the meaning of what the user set at ``key``."""
    old = origins.value(key)
    if old is None or old == new or not _set_by_user(key, origins):
        return True

    # a cure may add steps, but not to a request that would neither train, load, import nor save weights
    if key == "steps" and isinstance(old, dict) and isinstance(new, list):
        worth = bool(WEIGHT_SOURCES & set(new)) or "save" in old
        return set(old) <= set(new) and (set(old) == set(new) or worth)

    # a number may change to one of up to twice or half its size, a misspelled word to the right one, a folder
    # to a path in it, and a list to any list
    if isinstance(old, bool) or isinstance(new, bool) or new is None:
        return False
    if isinstance(old, int | float) and isinstance(new, int | float):
        return old / 2 <= new <= old * 2 and new != 1
    if isinstance(old, str) and isinstance(new, str):
        known = old in keys.literals(keys.at(key.split("."), origins.data))
        inside = new.startswith(f"{old.rstrip('/')}/")
        return not known and (inside or nearest(old, [new]) is not None)
    return isinstance(old, list | tuple) and isinstance(new, list | tuple)


def _set_by_user(key: str, origins: Origins) -> bool:
    """Returns true if the user's command line or files set ``key`` or a key below it."""
    last = [*origins.all(key)[-1:], *(p[-1] for k, p in origins.places.items() if k.startswith(f"{key}."))]
    return any(place.typed or not place.shipped for place in last)


def settings(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields every key that the overrides in ``words`` set, and its new value; ``None`` for a deleted key."""
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
