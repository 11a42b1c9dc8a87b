"""The words that can be completed: flags, keys, and values that have names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from launcher.job.args import FLAGS, SHORT
from launcher.job.overrides.grammar import written
from launcher.job.schema import schema_keys
from launcher.job.yaml.config_files import ConfigFiles


def flags() -> tuple[str, ...]:
    return (*FLAGS, *SHORT)


def keys(values: Mapping[str, Sequence[str]]) -> list[str]:
    """``KEY=`` for each setting, and ``KEY.`` for each section.

    A section also has ``KEY=`` if it is in ``values``.
    """
    every = list(dict.fromkeys((*(key for key, _ in noted()), *values, "sweep_dir")))
    above = {key.rpartition(".")[0] for key in every}
    out = [f"{key}=" for key in every if key not in above or key in values]
    return sorted([*out, *(f"{key}." for key in above if key)])


def values() -> dict[str, tuple[str, ...]]:
    """The values by key: shipped options of groups, literals of the schema, true and false."""
    found: dict[str, dict[str, None]] = {}
    configs = ConfigFiles()
    for group in configs.groups():
        found[group] = dict.fromkeys(configs.options(group))
    for key, note in noted():
        listed = [written(value) for value in _named(note)]
        if listed:
            found.setdefault(key, {}).update(dict.fromkeys(listed))
    return {key: tuple(found[key]) for key in sorted(found)}


def noted() -> Iterator[tuple[str, Any]]:
    """Yields each key with its type; a key of several models or data sets once with each of its types."""
    yield from schema_keys.noted()
    step = schema_keys.below(schema_keys.anywhere("steps"), "", {})
    for name, cls in schema_keys.kinds(step).items():
        yield from schema_keys.noted(cls, f"steps.{name}")


def _named(note: Any) -> list[Any]:
    members = set(_members(note))
    named = [*schema_keys.literals(note), *((True, False) if bool in members else ())]
    sections = [m for m in members if schema_keys.settings(m, None) is not None]
    return [*named, None] if NoneType in members and (named or sections) else named


def _members(note: Any) -> Iterator[Any]:
    while get_origin(note) is Annotated:
        note = get_args(note)[0]
    if get_origin(note) in (Union, UnionType):
        for member in get_args(note):
            yield from _members(member)
    else:
        yield note
