"""The schema's complaints in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from launcher.errors import Problem
from launcher.job.cures import suggested_override, suggestions
from launcher.job.overrides import intended_value
from launcher.job.overrides.grammar import paste, shell, written
from launcher.job.schema import schema_keys
from launcher.job.schema.job import Job
from launcher.job.schema.python_errors import reason
from launcher.job.schema.redact import HIDDEN, secret, values
from launcher.job.schema.similar_names import nearest
from launcher.job.yaml.origins import Origins

KINDS = {"model": "model", "data": "data set", "optim": "optimizer", "schedule": "schedule", "steps": "step"}


@dataclass(frozen=True)
class Spot:
    """What a complaint is about: the parts of a key, then positions in the list it holds."""

    parts: tuple[str, ...]
    items: tuple[int, ...]


def explain(error: ValidationError, data: Mapping[str, Any], origins: Origins) -> Iterator[Problem]:
    """One problem a key, in the order of the schema."""
    grouped: dict[tuple[str, ...], list[tuple[Spot, ErrorDetails]]] = {}
    for detail in error.errors(include_url=False):
        spot = _spot(detail["loc"], data, detail["type"])
        grouped.setdefault(spot.parts, []).append((spot, detail))
    for parts, details in grouped.items():
        spot, detail = max(details, key=lambda d: len(d[0].items))
        if spot.items or len(details) == 1:
            yield _problem(spot, detail, data, origins)
        else:
            yield _choice(parts, [d for _, d in details], data, origins)


def shown(value: Any, key: str) -> str:
    """A value as the user would write it, short, secrets hidden."""
    if secret(key) and value is not None:
        return HIDDEN
    text = value if isinstance(value, str) and value.strip() else written(values(value, key))
    return text if len(text) <= 60 else text[:57] + "..."


def unknown(parts: tuple[str, ...], bad: int, data: Mapping[str, Any], origins: Origins) -> Problem:
    """A key that the schema does not have at part ``bad``."""
    value: Any = data
    for part in parts:
        value = value.get(part) if isinstance(value, Mapping) else None
    while isinstance(value, Mapping) and len(value) == 1 and ".".join(parts) not in origins.places:
        (name, value), *_ = value.items()
        parts = (*parts, str(name))
    key = ".".join(parts)
    right = suggestions.key(parts, bad, data)
    origin = origins.of(key)
    drop = "" if origin and origin.typed else shell(f"~{key}")
    if right is None:
        valid = schema_keys.names(parts[:bad], data)
        why = suggestions.why_not(parts[-1])
        listed = f" (valid here: {', '.join(valid)})" if valid else ""
        ours = origin is not None and origin.shipped  # a recipe's, for another option than the one chosen now
        return Problem(key, f"unknown key{f': {why}' if why else listed}", drop if ours else "")
    text = f"unknown key, did you mean {right!r}?"
    if secret(key):
        return Problem(key, text)
    return Problem(key, text, f"{drop} {_moved(right, value, data)}".strip())


def _moved(key: str, value: Any, data: Mapping[str, Any]) -> str:
    """``value`` at ``key``, in the form that this takes."""
    parts = tuple(key.split("."))
    note = schema_keys.at(parts, data)
    fits = isinstance(value, Mapping) or schema_keys.accepts(note, value)
    return paste(key, value) if fits else suggested_override.value(parts, value, data) or paste(key, value)


def _spot(loc: Sequence[int | str], data: Any, kind: str) -> Spot:
    note: Any = Job
    parts: list[str] = []
    items: list[int] = []
    for i, part in enumerate(loc):
        if isinstance(part, int):
            items.append(part)
        elif part in schema_keys.kinds(note):
            note = schema_keys.kinds(note)[part]
        elif items or part == "[key]":
            continue
        elif isinstance(data, Mapping) and (part in data or (kind == "missing" and i == len(loc) - 1)):
            note, data = schema_keys.below(note, part, data), data.get(part)
            parts.append(part)
    return Spot(tuple(parts), tuple(items))


def _problem(spot: Spot, detail: ErrorDetails, data: Mapping[str, Any], origins: Origins) -> Problem:
    key, kind, bad = ".".join(spot.parts), detail["type"], detail["input"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown(spot.parts, len(spot.parts) - 1, data, origins)
    if kind == "missing" and not spot.items:
        return missing(spot.parts, data, origins)
    if kind.startswith("union_tag"):
        return _untagged(spot.parts, bad, data, origins)
    if kind == "value_error":
        return _value_error(spot, str(context["error"]), bad, data, origins)
    reason = _reason(detail, schema_keys.literals(schema_keys.at(spot.parts, data)))
    if spot.items:
        whole = origins.value(key)
        at = "".join(f"[{i}]" for i in spot.items)
        item = "" if kind == "missing" else f" = {shown(bad, key)}"
        return Problem(
            key, f"{shown(whole, key)}: item {at}{item} {reason}", suggested_override.value(spot.parts, whole, data)
        )
    return Problem(key, f"{shown(bad, key)}: {reason}", suggested_override.value(spot.parts, bad, data))


def _choice(
    parts: tuple[str, ...], details: Sequence[ErrorDetails], data: Mapping[str, Any], origins: Origins
) -> Problem:
    """No member of a union of plain types fits."""
    key, bad = ".".join(parts), details[0]["input"]
    words = schema_keys.literals(schema_keys.at(parts, data))
    reasons = [_reason(d, ()).removeprefix("should be ") for d in details if d["type"] != "literal_error"]
    hint = intended_value.word_of(bad, words) if isinstance(bad, str) else None
    text = f"should be {' or '.join([*words, *reasons])}" + (f", did you mean {hint!r}?" if hint else "")
    return Problem(key, f"{shown(bad, key)}: {text}", suggested_override.value(parts, bad, data))


def _reason(detail: ErrorDetails, words: Sequence[str]) -> str:
    kind = detail["type"]
    if kind == "literal_error":
        hint = intended_value.word_of(detail["input"], [str(w) for w in words])
        listed = ", ".join(map(str, words))
        return f"should be one of {listed}" + (f"; did you mean {hint!r}?" if hint else "")
    return "is missing" if kind == "missing" else reason(detail)


def missing(parts: tuple[str, ...], data: Mapping[str, Any], origins: Origins) -> Problem:
    """A key that must be given: nobody set it, or it was left at ``???``."""
    note = schema_keys.at(parts, data)
    if tags := schema_keys.kinds(note):
        listed = [t for t in tags if t != "_target_"]
        return Problem(".".join(parts), f"needs a choice (there are: {', '.join(listed)})")
    field = schema_keys.field_at(parts, data)
    what = f": {field.description}" if field is not None and field.description else ""
    return Problem(".".join(parts), f"needs a value{what}")


def _untagged(parts: tuple[str, ...], bad: Any, data: Mapping[str, Any], origins: Origins) -> Problem:
    """A model, data set, optimizer, schedule or step that is not there."""
    tags = [t for t in schema_keys.kinds(schema_keys.at(parts, data)) if t != "_target_"]
    word, title = KINDS[parts[0]], "steps" if parts[0] == "steps" else f"{KINDS[parts[0]]}s"
    if not isinstance(bad, Mapping):
        return Problem(".".join(parts), f"{shown(bad, '')}: should be a group of keys ({title}: {', '.join(tags)})")
    field = "kind" if parts[0] == "steps" else "name"
    tag = bad.get(field)
    step = parts[0] == "steps" and tag == parts[-1]
    key = ".".join(parts if step else (*parts, field))
    if tag is None:
        return Problem(key, f"needs a value ({title}: {', '.join(tags)})")
    hint = nearest(tag, tags)
    text = f"unknown {word} {tag!r}{suggestions.choice(tag, tags, title)}"
    if not step:
        return Problem(key, text, paste(key, hint) if hint else "")
    origin = origins.of(key)
    if hint is None:
        return Problem(key, text)
    kept = [paste(f"steps.{hint}.{name}", v) for name, v in bad.items() if name != "kind"]
    if origin and origin.typed:
        return Problem(key, text, " ".join(kept))
    return Problem(key, text, " ".join([shell(f"~{key}"), f"steps.{hint}.kind={hint}", *kept]))


def _value_error(spot: Spot, message: str, bad: Any, data: Mapping[str, Any], origins: Origins) -> Problem:
    """A rule over several keys names the key it is about first: ``model.heads=3 must divide ...``."""
    advice = re.search(r"use ([\w.]+=[\w.\[\],-]+)", message)
    named = re.match(r"([a-z_]+(?:\.[a-z_]+)+)=([^\s:]+):? (.*)", message, re.DOTALL)
    if named:
        fixed = (
            advice[1] if advice else suggested_override.value(tuple(named[1].split(".")), origins.value(named[1]), data)
        )
        return Problem(named[1], f"{named[2]}: {named[3]}", fixed)
    key = ".".join(spot.parts)
    if isinstance(bad, Mapping):
        return Problem(
            key,
            f"{shown(bad, key)}: {message}",
            advice[1] if advice else suggested_override.group(spot.parts, bad, data),
        )
    fixed = advice[1] if advice else suggested_override.value(spot.parts, bad, data)
    return Problem(key, f"{shown(bad, key)}: {message}", fixed)
