"""Formats problems, and a composed configuration, as text for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import yaml

from launcher.errors import Problem, printable
from launcher.job.cures.validation_errors import shown
from launcher.job.origins import Origins
from launcher.job.schema import redact

LONGEST = 300


def render(
    problems: Iterable[Problem],
    origins: Origins | Mapping[Problem, Origins] | None = None,
    secrets: Collection[str] = (),
) -> str:
    """Describes every problem, where its key was set and what to type instead.

    Hides ``secrets``. ``origins``: those of the request, or of each problem. The text does not end in a
    newline.
    """
    listed = list(problems)
    noun = "problem" if len(listed) == 1 else "problems"
    blocks = [f"error: {len(listed)} {noun} in this request; nothing was started"]
    for problem in listed:
        places = origins.get(problem) if isinstance(origins, Mapping) else origins
        blocks.append(_one(problem, places or Origins(), secrets))
    return redact.hide("\n\n".join(blocks), secrets)


def _one(problem: Problem, origins: Origins, secrets: Collection[str]) -> str:
    key = problem.key
    text = printable(problem.text, "\n\t")
    if key:
        value = shown(origins.value(key), key)
        joint = " = " if text.startswith(f"{value}: ") else ": "
        lines = [f"  {printable(key)}{joint}{text}", *_source(key, origins)]
    else:
        lines = [f"  {text}"]
    if problem.cure.isprintable() and problem.cure and not _secret(problem.cure, secrets):
        lines.append(f"    try:    {problem.cure}")
    return "\n".join(lines)


def _secret(cure: str, secrets: Collection[str]) -> bool:
    """Returns true if ``cure`` contains a secret."""
    return redact.hide(cure, secrets) != cure or any(redact.text(word) != word for word in shlex.split(cure))


def _source(key: str, origins: Origins) -> list[str]:
    origin = origins.of(key)
    if origin is None:
        return ["    set in: default"] if origins.value(key) is not None else []
    if origin.typed:
        return [f"    set by: {_short(origin.text)} ({origin.where})"]
    return [f"    set in: {printable(origin.where)}", f"          | {_short(origin.text)}"]


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def as_yaml(data: dict[str, Any]) -> str:
    """Returns a configuration as YAML for people: keys in their order, secrets hidden."""
    return yaml.safe_dump(redact.values(data), sort_keys=False, allow_unicode=True, width=120)
