"""Records where each value was set: a line of a file, or an override."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from launcher.job.config_folders import shipped, short
from launcher.job.schema.redact import HIDDEN, place, secret
from launcher.job.schema.redact import text as redacted
from launcher.job.yaml_limits import check, composed

COMMAND_LINE = "command line"
NULL = ("null", "~", "")
"""The ways to write null in YAML."""
_READ = 1_000
"""The most characters of a line that are read; a message shows fewer."""


@dataclass(frozen=True)
class Origin:
    """A place that set a value.

    ``where``: ``file:line:col`` or ``command line``; ``text``: the line or the override. ``value``: the
    scalar that was set there, as written. ``shipped``: in one of our files, not the user's.
    """

    where: str
    text: str
    value: str | None = None
    shipped: bool = False

    @property
    def typed(self) -> bool:
        return self.where == COMMAND_LINE


@dataclass(frozen=True)
class Origins:
    """Every place that set each dotted key; the last one counts.

    ``data``: the composed configuration.
    """

    places: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    def all(self, key: str) -> tuple[Origin, ...]:
        return self.places.get(key, ())

    def of(self, key: str) -> Origin | None:
        """Returns the origin of ``key``, of a key below it, or of the nearest one above.

        Returns ``None`` for a default. A group that one place sets to null exists because another place sets
        a key below it.
        """
        own = self.places.get(key, ())[-1:]
        if own and own[0].value not in NULL:
            return own[0]
        below = [p[-1] for k, p in self.places.items() if k.startswith(key + ".")]
        if below or own:
            return [*own, *below][-1]
        above, _, _ = key.rpartition(".")
        return self.of(above) if above else None

    def value(self, key: str) -> Any:
        """Returns the composed value at ``key``; ``None`` if there is none.

        Names in ``data`` may contain dots.
        """
        return _value(self.data, key)


def _value(node: Any, key: str) -> Any:
    if not isinstance(node, Mapping):
        return None
    if key in node:
        return node[key]
    below = {name: child for name, child in node.items() if key.startswith(f"{name}.")}
    values = (_value(child, key.removeprefix(f"{name}.")) for name, child in below.items())
    return next((value for value in values if value is not None), None)


def of_files(files: Iterable[tuple[Path, str]]) -> Iterator[tuple[str, Origin]]:
    """Yields every key of every file, in order. ``files``: paths, each with the package of its keys."""
    for path, package in files:
        if shipped(path):
            yield from _of_shipped(path, package, short(path), True)
        else:
            yield from _of_file(path, package, short(path), False)


def _of_file(path: Path, package: str, name: str, ours: bool) -> tuple[tuple[str, Origin], ...]:
    check(path)
    lines = [line[:_READ] for line in path.read_text(encoding="utf-8").splitlines()]
    readable = cache(redacted)  # a line may set many keys
    out = []
    for key, mark, value in _marks(path, package):
        where = f"{name}:{mark.line + 1}:{mark.column + 1}"
        line = lines[mark.line].rstrip() if mark.line < len(lines) else ""
        number = value is not None and value in line and readable(line) == line
        if secret(key) and value not in (None, "", "null", "~") and not place(str(value)) and not number:
            source = f"{line[: mark.column]}{key.rpartition('.')[2]}: {HIDDEN}"
            out.append((key, Origin(where, source, HIDDEN, ours)))
        else:
            out.append((key, Origin(where, readable(line), value, ours)))
    return tuple(out)


_of_shipped = lru_cache(256)(_of_file)  # shipped files never change


def _marks(path: Path, package: str) -> Iterator[tuple[str, Any, str | None]]:
    root = composed(path)
    if not isinstance(root, yaml.MappingNode):
        return
    for key, value in root.value:
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            yield from _choices(value)
        else:
            yield from _walk(key, value, package)


def _choices(defaults: yaml.SequenceNode) -> Iterator[tuple[str, Any, str | None]]:
    """Yields choices in a defaults list: ``- override /model: lm`` sets ``model``."""
    for item in defaults.value:
        for key, value in item.value if isinstance(item, yaml.MappingNode) else ():
            option = value.value if isinstance(value, yaml.ScalarNode) else None
            yield key.value.split()[-1].lstrip("/"), key.start_mark, option


def _walk(key: yaml.Node, value: yaml.Node, above: str) -> Iterator[tuple[str, Any, str | None]]:
    name = f"{above}.{key.value}" if above else str(key.value)
    yield name, key.start_mark, value.value if isinstance(value, yaml.ScalarNode) else None
    if isinstance(value, yaml.MappingNode):
        for k, v in value.value:
            yield from _walk(k, v, name)


def gather(places: Iterable[tuple[str, Origin]], data: Mapping[str, Any]) -> Origins:
    """Collects origins from (key, origin) pairs; the last of each key counts."""
    out: dict[str, tuple[Origin, ...]] = {}
    for key, origin in places:
        out[key] = (*out.pop(key, ()), origin)
    return Origins(out, data)
