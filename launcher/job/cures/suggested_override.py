"""Suggests an override in place of a wrong value, if the intended value can be inferred."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.job.overrides import intended_value
from launcher.job.overrides.grammar import paste
from launcher.job.schema import schema_keys
from launcher.job.schema.redact import secret

_NONE = object()  # None may itself be the intended value


def value(parts: tuple[str, ...], bad: Any, data: Any) -> str:
    """``key=value`` with the first reading of ``bad`` that the schema accepts; "" if there is none."""
    key = ".".join(parts)
    note = schema_keys.at(parts, data)
    if secret(key) or note is None:
        return ""
    good = next(intended_value.readings(key, note, bad), _NONE)
    return "" if good is _NONE else paste(key, good)


def group(parts: tuple[str, ...], bad: Mapping[str, Any], data: Any) -> str:
    """``key={...}`` with the first change to ``bad`` that the schema accepts; "" if it accepts none.

    Tries its lists of numbers sorted and without duplicates, then every other word at a key that takes words.
    """
    note = schema_keys.at(parts, data)
    for good in (_sorted_lists(bad), *_other_words(parts, bad, data)):
        if schema_keys.accepts(note, good):
            return paste(".".join(parts), good) if good else ""
    return ""


def _sorted_lists(bad: Mapping[str, Any]) -> dict[str, Any]:
    numbers = [k for k, v in bad.items() if isinstance(v, list) and {*map(type, v)} == {int}]
    return {**bad, **{k: sorted(set(bad[k])) for k in numbers}}


def _other_words(parts: tuple[str, ...], bad: Mapping[str, Any], data: Any) -> Iterator[dict[str, Any]]:
    """Yields ``bad`` with another word at one of its keys, if several of its keys are set."""
    keys = [k for k, v in bad.items() if v is not None]
    for k in keys if len(keys) > 1 else ():
        for word in schema_keys.literals(schema_keys.at((*parts, k), data)):
            yield {**bad, k: word}
