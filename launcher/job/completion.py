"""Shell completion: the scripts, and the words that they offer."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from launcher.job.args import FLAGS, SHORT
from launcher.job.config_folders import ConfigFiles
from launcher.job.overrides import written
from launcher.job.schema import keys as schema_keys


def flags() -> tuple[str, ...]:
    return (*FLAGS, *SHORT)


def keys(values: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns ``KEY=`` for each setting, and ``KEY.`` for each section.

    A section also has ``KEY=`` if it is in ``values``.
    """
    every = list(dict.fromkeys((*(key for key, _ in noted()), *values, "sweep_dir")))
    above = {key.rpartition(".")[0] for key in every}
    out = [f"{key}=" for key in every if key not in above or key in values]
    return sorted([*out, *(f"{key}." for key in above if key)])


def named_values() -> dict[str, tuple[str, ...]]:
    """Returns the values by key: shipped options of groups, literals of the schema, true and false."""
    values: dict[str, dict[str, None]] = {}
    configs = ConfigFiles()
    for group in configs.groups():
        values[group] = dict.fromkeys(configs.options(group))
    for key, note in noted():
        listed = [written(value) for value in _named(note)]
        if listed:
            values.setdefault(key, {}).update(dict.fromkeys(listed))
    return {key: tuple(values[key]) for key in sorted(values)}


def noted() -> Iterator[tuple[str, Any]]:
    """Yields each key with its type; a key that has several types is yielded once with each type."""
    yield from schema_keys.noted()
    step = schema_keys.below(schema_keys.any_annotation("steps"), "", {})
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


HERE = Path(__file__).parent / "shells"


def script(shell: str, first: Sequence[str]) -> str:
    """Returns the completion script for ``shell``. ``first``: the commands whose argument is a folder."""
    values = named_values()
    known = {
        "FIRST": _joined(first),
        "FLAGS": _joined(flags()),
        "KEYS": _joined(keys(values)),
        "VALUES": "\n".join(f"        {row}" for row in _ROWS[shell](values)),
    }
    text = (HERE / f"launcher.{shell}").read_text(encoding="utf-8")
    for name, listed in known.items():
        text = text.replace(f"@{name}@", listed)
    return text


def _case(values: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{key}) echo {_joined(listed)} ;;" for key, listed in values.items()]


def _switch(values: Mapping[str, Sequence[str]]) -> list[str]:
    split = "\n            string split ' ' "
    return [f"case {key}{split}{shlex.quote(' '.join(listed))}" for key, listed in values.items()]


_ROWS: dict[str, Callable[[Mapping[str, Sequence[str]]], list[str]]] = {
    "bash": _case,
    "zsh": _case,
    "fish": _switch,
}


def _joined(listed: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, listed))
