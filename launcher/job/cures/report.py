"""Problems as text for a person at a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import yaml

from launcher.errors import Problem, printable
from launcher.job.cures.validation_errors import shown
from launcher.job.schema import redact
from launcher.job.yaml.origins import Origins

LONGEST = 300


def render(
    problems: Iterable[Problem],
    origins: Origins | Mapping[Problem, Origins] | None = None,
    secrets: Collection[str] = (),
) -> str:
    """Every problem with where its key was set and what to type instead, without ``secrets``; no newline at the end."""
    listed = list(problems)
    count = f"{len(listed)} problem{'s' if len(listed) != 1 else ''}"
    head = f"error: {count} in this request; nothing was started"
    where = origins if isinstance(origins, Origins) else None
    each = origins if isinstance(origins, Mapping) else {}
    told = [_one(p, where or each.get(p, Origins()), secrets) for p in listed]
    return redact.hide("\n\n".join([head, *told]), secrets)


def _one(problem: Problem, origins: Origins, secrets: Collection[str]) -> str:
    key, text = problem.key, printable(problem.text, "\n\t")
    value = shown(origins.value(key), key) if key else ""
    joint = " = " if key and text.startswith(f"{value}: ") else ": "
    lines = [f"  {key}{joint}{text}" if key else f"  {text}"]
    if key:
        lines += _source(key, origins)
    if problem.cure and not _secret(problem.cure, secrets):
        lines.append(f"    try:    {problem.cure}")
    return "\n".join(lines)


def _secret(cure: str, secrets: Collection[str]) -> bool:
    """Whether one would be pasted that is not shown."""
    return redact.hide(cure, secrets) != cure or any(redact.text(word) != word for word in shlex.split(cure))


def _source(key: str, origins: Origins) -> list[str]:
    origin = origins.of(key)
    if origin is None:
        return ["    set in: default"] if origins.value(key) is not None else []
    if origin.typed:
        return [f"    set by: {_short(origin.text)} ({origin.where})"]
    return [f"    set in: {origin.where}", f"          | {_short(origin.text)}"]


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def as_yaml(data: dict[str, Any]) -> str:
    """A configuration to read: keys in their order, secrets hidden."""
    return yaml.safe_dump(redact.values(data), sort_keys=False, allow_unicode=True, width=120)
