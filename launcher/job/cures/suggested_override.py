"""An override to paste that makes a bad value what it was meant to be; none where that cannot be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.job.overrides import intended_value
from launcher.job.overrides.grammar import paste
from launcher.job.schema import schema_keys
from launcher.job.schema.redact import secret


def value(parts: tuple[str, ...], bad: Any, data: Any) -> str:
    """``key=value`` with the first reading of ``bad`` that the schema accepts; "" when it has none."""
    key = ".".join(parts)
    note = schema_keys.at(parts, data)
    if secret(key) or note is None:
        return ""
    good = next(intended_value.readings(key, note, bad), _NONE)
    return "" if good is _NONE else paste(key, good)


_NONE = object()


def group(parts: tuple[str, ...], bad: Mapping[str, Any], data: Any) -> str:
    """``key={...}``: the first that the schema accepts of ``bad`` with its lists in order, each number once, and
    ``bad`` with another word at a key that takes words; "" when it accepts none."""
    ordered = {k: sorted(set(v)) if isinstance(v, list) and {*map(type, v)} == {int} else v for k, v in bad.items()}
    several = [k for k in bad if bad[k] is not None] if sum(v is not None for v in bad.values()) > 1 else []
    words = ({**bad, k: word} for k in several for word in schema_keys.literals(schema_keys.at((*parts, k), data)))
    note = schema_keys.at(parts, data)
    good = next((g for g in (ordered, *words) if schema_keys.accepts(note, g)), None)
    return paste(".".join(parts), good) if good else ""
