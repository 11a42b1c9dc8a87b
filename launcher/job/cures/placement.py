"""Inserts a cure into a command line: in place of the words that caused the problem, or at its end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from launcher.errors import Problem
from launcher.job.cures.safety import overlap, settable, settings
from launcher.job.overrides.grammar import OPEN, parsable, parse, shell
from launcher.job.schema.redact import text as redacted
from launcher.job.yaml.origins import Origin, Origins


def pasted(words: Sequence[str], problem: Problem, origins: Origins) -> tuple[str, ...]:
    """``words`` with the cure in place of those that caused the problem, or at the end if a file did."""
    new = shlex.split(problem.cure)
    start, taken = _place(words, problem, origins)
    if start is None:
        return (*words, *(w for w in new if w not in words))
    return (*words[:start], *new, *words[start + taken :])


def _place(words: Sequence[str], problem: Problem, origins: Origins) -> tuple[int | None, int]:
    """The index of the first of the words that caused the problem, and their number.

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
    """The override that set the key of ``problem``; ``None`` if a file set it or nothing did."""
    origin = origins.of(problem.key) if problem.key else None
    return origin if origin is not None and origin.typed else None


def whole_override(problem: Problem, origins: Origins) -> Problem:
    """Adds the override to a cure that would replace it, if the cure only sets other keys."""
    origin = typed_origin(problem, origins)
    if not problem.cure or origin is None or problem.words:
        return problem

    # not if the cure contains it or is a flag, or the override cannot be parsed
    words = shlex.split(problem.cure)
    if any(w.startswith("-") for w in words) or origin.text in words or not parsable(origin.text):
        return problem

    # not if the cure replaces the key itself
    own = parse(origin.text).key_or_group
    if not settable(problem.key.split("."), origins) or any(own.startswith(f"{node}.") for node in OPEN):
        return problem
    if any(overlap(key, own) for key, _ in settings(words)):
        return problem
    return replace(problem, cure=f"{shell(origin.text)} {problem.cure}")


def swept(problem: Problem, origins: Origins, words: Sequence[str]) -> Problem:
    """The ``problem`` of one cell of a sweep, with a cure that does not change the other cells."""
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
