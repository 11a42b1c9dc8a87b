"""Replaces wrong values by valid placeholders, so that the rest of a request can be checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from launcher.job.overrides.grammar import written
from launcher.job.schema import schema_keys
from launcher.job.yaml.origins import Origins


def placeholder(key: str, origins: Origins, which: int) -> str | None:
    """The override that sets ``key`` to its first (``which`` 1: second) valid value; ``None`` without any.

    A problem that occurs with both of them does not depend on the unknown value.
    """
    parts = tuple(key.split("."))
    note = schema_keys.at(parts, origins.data)
    if note is None or isinstance(origins.value(key), dict):
        return None
    good: list[Any] = []
    for value in _candidates(parts, origins):
        if value not in good and schema_keys.accepts(note, value):
            good.append(value)
    return f"{key}={written(good[min(which, len(good) - 1)])}" if good else None


def _plain(text: str) -> Any:
    """The value of a line of YAML; ``None`` if it is not YAML or a secret, which is stored as ``***``."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _candidates(parts: tuple[str, ...], origins: Origins) -> Iterator[Any]:
    for place in reversed(origins.all(".".join(parts))[:-1]):
        if place.value and "${" not in place.value:
            yield _plain(place.value)
    field = schema_keys.field_at(parts, origins.data)
    if field is not None and not field.is_required() and not isinstance(field.default, BaseModel):
        yield field.get_default(call_default_factory=True, validated_data={})
    yield from schema_keys.literals(schema_keys.at(parts, origins.data))
    yield from (8, 0.1, 16, 0.2, True, False, 1, 0.5, None, "text")
