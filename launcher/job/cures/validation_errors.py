"""Explains schema errors in plain words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.errors import Problem
from launcher.job import intended_value
from launcher.job.config_folders import ConfigFiles
from launcher.job.cures import corrected_key, corrected_value, keys_of_other_programs
from launcher.job.cures.keeps_meaning import settings
from launcher.job.cures.keys_of_other_programs import NOT_NEGATED
from launcher.job.cures.options_of_other_programs import of_other_programs
from launcher.job.origins import Origins
from launcher.job.overrides import OPERATORS, nameable, paste, shell, written
from launcher.job.schema import keys
from launcher.job.schema import keys as schema_keys
from launcher.job.schema.components import Metric
from launcher.job.schema.did_you_mean import did_you_mean, nearest, unknown_choice
from launcher.job.schema.job import Job
from launcher.job.schema.python_errors import reason
from launcher.job.schema.redact import HIDDEN, addresses, hidden, secret, values

KINDS = {
    "model": "model", "data": "data set", "loss": "loss", "optim": "optimizer", "schedule": "schedule",
    "steps": "step",
}  # fmt: skip
PLURAL = {"loss": "losses"}
SHOWN = 50
"""The number of keys whose problems are reported one by one: each suggestion searches all keys."""
MORE = "more keys are wrong"
"""The end of a problem that stands for several keys."""
NEEDS = "needs a value"
"""The beginning of a problem of a missing key."""
USUAL = {"parallel.recompute.modules": "*"}
"""Keys without a default, and the value that other programs suppose."""
_WIDTH = 60
"""The most characters of a value that a problem shows."""


@dataclass(frozen=True)
class Spot:
    """What a validation error is about: the parts of a key, and the index in the list at that key."""

    parts: tuple[str, ...]
    items: tuple[int, ...]


def explain(error: ValidationError, data: Mapping[str, Any], origins: Origins) -> Iterator[Problem]:
    """Yields one problem per key, in the order of the schema.

    A key that is missing because it has another name is not a problem of its own.
    """
    problems = list(_explained(error, data, origins))
    moved = {key for p in problems for key, _ in settings(shlex.split(p.cure)) if key != p.key}
    yield from (p for p in problems if not (p.key in moved and p.text.startswith(NEEDS)))


def _explained(error: ValidationError, data: Mapping[str, Any], origins: Origins) -> Iterator[Problem]:
    grouped: dict[tuple[str, ...], list[tuple[Spot, ErrorDetails]]] = {}
    for detail in error.errors(include_url=False):
        spot = _spot(detail["loc"], data, detail["type"])
        grouped.setdefault(spot.parts, []).append((spot, detail))
    for parts, details in islice(grouped.items(), SHOWN):
        deepest, detail = max(details, key=lambda d: len(d[0].items))
        if deepest.items or len(details) == 1:
            yield _problem(deepest, detail, data, origins)
        else:
            yield _choice(parts, [d for _, d in details], data, origins)
    if len(grouped) > SHOWN:
        yield counted([".".join(parts) for parts in islice(grouped, SHOWN, None)])


def counted(keys: Sequence[str]) -> Problem:
    """Returns the problem that stands for all ``keys``.

    It names the key above all of them, or else the first of them.
    """
    if len(keys) == 1:
        return Problem(keys[0], "is also wrong")
    levels = zip(*(key.split(".") for key in keys), strict=False)
    above = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)]
    if above:
        return Problem(".".join(above), f"{len(keys)} {MORE}")
    return Problem(keys[0], f"this and {len(keys) - 1} {MORE}")


def shown(value: Any, key: str) -> str:
    """Returns a value as the user would write it, shortened, with secrets hidden."""
    if hidden(key, value) or (secret(key) and isinstance(value, str)):
        return HIDDEN
    value, _ = _head(value, _WIDTH)
    text = addresses(value) if isinstance(value, str) and value.strip() else written(values(value, key))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _head(value: Any, room: int) -> tuple[Any, int]:
    """Returns ``value`` cut after its first ``room`` scalars, and how many more scalars would fit."""
    if isinstance(value, Mapping):
        group: dict[Any, Any] = {}
        for name, one in value.items():
            if room <= 0:
                break
            group[name], room = _head(one, room)
        return group, room - (not group)
    if isinstance(value, list | tuple):
        items: list[Any] = []
        for one in value:
            if room <= 0:
                break
            item, room = _head(one, room)
            items.append(item)
        return items, room - (not items)
    return value, room - 1


def unknown(parts: tuple[str, ...], bad: int, data: Mapping[str, Any], origins: Origins) -> Problem:
    """Returns the problem of a key whose part ``bad`` is unknown to the schema."""
    # name the key that was set: a.b if a contains nothing else
    value: Any = data
    for part in parts:
        value = value.get(part) if isinstance(value, Mapping) else None
    while isinstance(value, Mapping) and len(value) == 1 and ".".join(parts) not in origins.places:
        (name, value), *_ = value.items()
        parts = (*parts, str(name))

    key = ".".join(parts)
    origin = origins.of(key)
    if not nameable(key):  # no override can name it, so none can delete it
        return Problem(key, f"unknown key{_blank_missing(parts[-1]) or _valid_here(parts, bad, data)}")
    right = corrected_key.key(parts, bad, data)
    drop = "" if origin and origin.typed else shell(f"~{key}")
    if right is None:
        ours = origin is not None and origin.shipped  # set by a recipe for another option
        meant = keys_of_other_programs.switch(parts, value) or _option_meant(parts, value)
        cure = f"{drop} {meant}".strip() if meant else drop if ours else ""
        return Problem(key, f"unknown key{_valid_here(parts, bad, data)}", cure)
    text = f"unknown key{did_you_mean(right)}"
    if hidden(key, value):
        return Problem(key, text)
    negated = corrected_key.NEGATED.match(parts[-1]) and parts[-1] not in NOT_NEGATED
    if negated and not corrected_key.NEGATED.match(right.rpartition(".")[2]):
        if not isinstance(value, bool):
            return Problem(key, text)
        value = not value  # disable_x=true means x=false
    meant = _moved(right, keys_of_other_programs.translated(parts[-1], value), data)
    return Problem(key, text, f"{drop} {meant}".strip())


def _option_meant(parts: tuple[str, ...], value: Any) -> str:
    """Returns the choice of an option that other programs choose by a key.

    Returns "" if the option does not exist.
    """
    group = keys_of_other_programs.group(".".join(parts))
    option = str(value).lower()
    if not group:
        return ""
    if known := of_other_programs(group, option):
        return known[1]
    return paste(group, option) if option in ConfigFiles().options(group) else ""


def _blank_missing(name: str) -> str:
    """Returns an explanation for ``nproc:4``, which is one word in YAML; "" for other names."""
    key, colon, value = name.partition(":")
    return f": YAML needs a space after the colon, as in {key}: {value}" if key and colon and value else ""


def _valid_here(parts: tuple[str, ...], bad: int, data: Mapping[str, Any]) -> str:
    """Returns why a key of other programs does not exist here.

    For any other key it returns the valid keys at its place.
    """
    if "." in parts[bad]:
        group, _, name = parts[bad].rpartition(".")
        return (
            f": a file nests keys instead of joining them: write {group.replace('.', ': {')}: {{{name}: ...}}"
            + "}" * group.count(".")
        )
    why = keys_of_other_programs.why_not(".".join(parts)) or _of_other_options(parts, data)
    if why:
        return f": {why}"
    valid = schema_keys.names(parts[:bad], data)
    return f" (valid here: {', '.join(valid)})" if valid else ""


def _of_other_options(parts: tuple[str, ...], data: Mapping[str, Any]) -> str:
    """Names the options that have this key; "" if none has it, or if it is no key of an option."""
    section, *rest = parts
    if section not in KINDS or section == "steps" or len(rest) != 1:
        return ""
    tags = schema_keys.kinds(schema_keys.at((section,), data))
    having = [tag for tag, cls in tags.items() if rest[0] in schema_keys.fields(cls) and tag != "_target_"]
    return f"it is a setting of {' and of '.join(f'{section}={tag}' for tag in having)}" if having else ""


def _moved(key: str, value: Any, data: Mapping[str, Any]) -> str:
    """Returns the override that sets ``key`` to ``value``, converted if possible to what the key accepts."""
    parts = tuple(key.split("."))
    note = schema_keys.at(parts, data)
    if isinstance(value, Mapping) or schema_keys.accepts(note, value):
        return paste(key, value)
    return corrected_value.value(parts, value, data) or paste(key, value)


def _spot(loc: Sequence[int | str], data: Any, kind: str) -> Spot:
    """Returns the position of pydantic's ``loc`` in ``data``, without the names of union members."""
    note: Any = Job
    parts: list[str] = []
    items: list[int] = []

    # descend in parallel: the annotation of each part, and the data there
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
    key = ".".join(spot.parts)
    kind = detail["type"]
    bad = detail["input"]

    # errors with their own text
    if spot.items and (kind.startswith("union_tag") or kind == "extra_forbidden"):
        return _listed(spot, detail, origins)
    if kind == "extra_forbidden":
        return unknown(spot.parts, len(spot.parts) - 1, data, origins)
    if kind == "missing" and not spot.items:
        return missing(spot.parts, data, origins)
    if kind.startswith("union_tag"):
        return _untagged(spot.parts, bad, data, origins)
    if kind == "value_error":
        return _value_error(spot, str(detail.get("ctx", {})["error"]), bad, data=data, origins=origins)

    if key == OPERATORS and isinstance(bad, str) and bad in ConfigFiles().options("operators"):
        return _option(key, bad, origins)

    # a value of another program, a value of the wrong form, or an item of a list
    if not spot.items and (advice := keys_of_other_programs.of_value(key, bad)):
        why, cure = advice
        return Problem(key, f"{shown(bad, key)}: {why}", cure)
    why = _reason(detail, schema_keys.literals(schema_keys.at(spot.parts, data)))
    if kind == "model_type" and (needed := _required(spot.parts, data)):
        why += f"; it needs {', '.join(needed)}"
    if not spot.items:
        cure = corrected_value.value(spot.parts, bad, data)
        if f"{key}_file=" in cure:
            why += f"; {key}_file names a file"
        return Problem(key, f"{shown(bad, key)}: {why}", cure)
    listed = origins.value(key)
    at = "".join(f"[{i}]" for i in spot.items)
    item = "" if kind == "missing" else f" = {shown(bad, key)}"
    text = f"{shown(listed, key)}: item {at}{item} {why}"
    return Problem(key, text, corrected_value.value(spot.parts, listed, data))


def _option(key: str, name: str, origins: Origins) -> Problem:
    """Returns the problem of an option's name at ``operators``, where a group of keys is needed."""
    text = f"{name}: should be a group of keys; operators={name} chooses the option of this name"
    origin = origins.of(key)
    if origin is None or not origin.typed:
        return Problem(key, f"{text}, in a file - override /operators: {name} in its defaults")
    return Problem(key, text, f"operators={name}", (origin.text,))


def _required(parts: tuple[str, ...], data: Mapping[str, Any]) -> list[str]:
    """Returns the required keys of a group: those without a default."""
    group = schema_keys.settings(schema_keys.at(parts, data), {})
    return [name for name, field in schema_keys.fields(group).items() if field.is_required()] if group else []


_TOP = re.compile(r"top[_-]?(\d{1,6})(?:[_-]?acc(?:uracy)?)?", re.IGNORECASE)
"""Matches a name of other programs for the accuracy of the first k classes."""


def _listed(spot: Spot, detail: ErrorDetails, origins: Origins) -> Problem:
    """Returns the problem of an item of a list that is an unknown choice or has an unknown key."""
    key, bad = ".".join(spot.parts), detail["input"]
    listed = origins.value(key)
    at = f"{shown(listed, key)}: item {''.join(f'[{i}]' for i in spot.items)}"
    if detail["type"] == "extra_forbidden":
        return Problem(key, f"{at} has an unknown key {str(detail['loc'][-1])!r}")

    # a metric: no other list has choices
    tags = [t for t in schema_keys.kinds(Metric) if t != "_target_"]
    tag = bad.get("name") if isinstance(bad, Mapping) else bad
    if not isinstance(tag, str):
        return Problem(key, f"{at} needs a name (metrics: {', '.join(tags)})")
    text = f"{at}: unknown metric {tag!r}{unknown_choice(tag, tags, 'metrics')}"
    hint = nearest(tag, tags)
    right: Any = bad | {"name": hint} if len(bad) > 1 else hint
    if top := _TOP.fullmatch(tag):
        right = {"name": "top_k", "k": int(top[1])} if int(top[1]) > 1 else "accuracy"
        text = f"{at}: unknown metric {tag!r}: it is {written(right)} (metrics: {', '.join(tags)})"
    if right is None or not isinstance(listed, list):
        return Problem(key, text)
    items = [right if i == spot.items[0] else m for i, m in enumerate(listed)]
    return Problem(key, text, paste(key, [m for i, m in enumerate(items) if m not in items[:i]]))


def _choice(
    parts: tuple[str, ...], details: Sequence[ErrorDetails], data: Mapping[str, Any], origins: Origins
) -> Problem:
    """Returns the problem of a value that fits no member of a union of plain types."""
    key = ".".join(parts)
    bad = details[0]["input"]
    words = schema_keys.literals(schema_keys.at(parts, data))
    reasons = [_reason(d, ()).removeprefix("should be ") for d in details if d["type"] != "literal_error"]
    hint = intended_value.word_of(bad, words) if isinstance(bad, str) else None
    text = f"{shown(bad, key)}: should be {' or '.join([*words, *reasons])}{did_you_mean(hint)}"
    return Problem(key, text, corrected_value.value(parts, bad, data))


def _reason(detail: ErrorDetails, words: Sequence[str]) -> str:
    kind = detail["type"]
    if kind == "literal_error":
        listed = [str(word) for word in words]
        hint = intended_value.word_of(detail["input"], listed)
        return f"should be one of {', '.join(listed)}{did_you_mean(hint, joint='; ')}"
    return "is missing" if kind == "missing" else reason(detail)


def missing(parts: tuple[str, ...], data: Mapping[str, Any], origins: Origins) -> Problem:
    """Returns the problem of a required key that is not set, or that is still ``???``."""
    tags = schema_keys.kinds(schema_keys.at(parts, data))
    if tags:
        listed = [t for t in tags if t != "_target_"]
        return Problem(".".join(parts), f"needs a choice (options: {', '.join(listed)})")
    field = schema_keys.field_at(parts, data)
    description = f": {field.description}" if field is not None and field.description else ""
    key = ".".join(parts)
    cure = paste(key, USUAL[key]) if key in USUAL else ""
    return Problem(key, f"{NEEDS}{description}", cure)


def _untagged(parts: tuple[str, ...], bad: Any, data: Mapping[str, Any], origins: Origins) -> Problem:
    """Returns the problem of an unknown model, data set, optimizer, schedule or step."""
    section = parts[0]
    tags = [t for t in schema_keys.kinds(schema_keys.at(parts, data)) if t != "_target_"]
    title = PLURAL.get(section, f"{KINDS[section]}s")
    if not isinstance(bad, Mapping):
        text = f"{shown(bad, '')}: should be a group of keys ({title}: {', '.join(tags)})"
        return Problem(".".join(parts), text)

    # a step's kind defaults to its name; everything else is chosen by kind or name
    field = "kind" if section == "steps" else "name"
    tag = bad.get(field)
    step = section == "steps" and tag == parts[-1]
    key = ".".join(parts if step else (*parts, field))
    if tag is None:
        return Problem(key, f"{NEEDS} ({title}: {', '.join(tags)})")
    known = of_other_programs(section, str(tag)) if not step else None
    if known is not None:  # the same option, chosen by its name
        why, fixed = known
        text = f"unknown {KINDS[section]} {tag!r}: {why} ({title}: {', '.join(tags)})"
        return Problem(key, text, fixed.replace(f"{section}=", f"{key}=", 1))
    text = f"unknown {KINDS[section]} {tag!r}{unknown_choice(tag, tags, title)}"
    hint = nearest(tag, tags)
    if hint is None:
        return Problem(key, text)
    if not step:
        return Problem(key, text, paste(key, hint))

    # a misspelled step has its settings under the wrong name
    settings = [paste(f"steps.{hint}.{name}", v) for name, v in bad.items() if name != "kind"]
    origin = origins.of(key)
    if origin and origin.typed:
        return Problem(key, text, " ".join(settings))
    return Problem(key, text, " ".join([shell(f"~{key}"), f"steps.{hint}.kind={hint}", *settings]))


def _value_error(spot: Spot, message: str, bad: Any, *, data: Mapping[str, Any], origins: Origins) -> Problem:
    """Returns the problem of a broken rule of the schema.

    Its ``message`` may contain the cure: ``use key=value``. The message of a rule over several keys begins
    with the key at fault: ``model.heads=3 must divide ...``.
    """
    key = ".".join(spot.parts)
    text = f"{shown(bad, key)}: {message}"
    named = re.match(r"([a-z_]+(?:\.[a-z_]+)+)=([^\s:]+):? (.*)", message, re.DOTALL)
    if named:
        key = named[1]
        text = f"{named[2]}: {named[3]}"

    advice = re.search(r"use ([\w.]+=[\w.\[\],-]+)", message)
    if advice:
        return Problem(key, text, advice[1])
    if named:
        return Problem(key, text, corrected_value.value(tuple(key.split(".")), origins.value(key), data))
    if isinstance(bad, Mapping):
        return Problem(key, text, corrected_value.group(spot.parts, bad, data))
    return Problem(key, text, corrected_value.value(spot.parts, bad, data))


def placeholder(key: str, origins: Origins, which: int) -> str | None:
    """Returns the override that sets ``key`` to its first (``which`` 0) or second valid value.

    A problem that occurs with both of them does not depend on the unknown value. Returns ``None`` if no valid
    value is known.
    """
    parts = tuple(key.split("."))
    note = keys.at(parts, origins.data)
    if note is None or isinstance(origins.value(key), dict):
        return None
    good: list[Any] = []
    for value in _candidates(parts, origins):
        if value not in good and keys.accepts(note, value):
            good.append(value)
    return f"{key}={written(good[min(which, len(good) - 1)])}" if good else None


def _plain(text: str) -> Any:
    """Returns the value of a line of YAML.

    Returns ``None`` if it is not YAML or a secret, which is stored as ``***``.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _candidates(parts: tuple[str, ...], origins: Origins) -> Iterator[Any]:
    for place in reversed(origins.all(".".join(parts))[:-1]):
        if place.value and "${" not in place.value:
            yield _plain(place.value)
    field = keys.field_at(parts, origins.data)
    if field is not None and not field.is_required() and not isinstance(field.default, BaseModel):
        yield field.get_default(call_default_factory=True, validated_data={})
    yield from keys.literals(keys.at(parts, origins.data))
    yield from (8, 0.1, 16, 0.2, True, False, 1, 0.5, None, "text")
