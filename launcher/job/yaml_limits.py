"""Reads YAML files within bounds: before parsing, refuses files that could exhaust memory or time.

Shipped files are parsed by libyaml, which is ten times as fast, others by Python's parser. A test checks
that both read the shipped files alike. In rare cases, and in their messages, the two differ, but a user's
file must mean the same on every machine, with or without libyaml.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import Problem
from launcher.job.config_folders import shipped, short


def parser(path: Path) -> Any:
    """Returns the loader class for events and nodes of ``path``."""
    return yaml.CSafeLoader if yaml.__with_libyaml__ and shipped(path) else yaml.SafeLoader


_STANDARD = "tag:yaml.org,2002:"
_TEXT, _MERGE = f"{_STANDARD}str", f"{_STANDARD}merge"
TAGS = {
    yaml.ScalarEvent: ("str", "int", "float", "bool", "null"),
    yaml.SequenceStartEvent: ("seq",),
    yaml.MappingStartEvent: ("map",),
}
"""The tags that a file may write at each kind of node: others build values that are not plain data."""


@lru_cache(2)
def _loader(fast: bool) -> Any:
    """Returns OmegaConf's loader, which has its own rules for numbers, dates and duplicate keys.

    Keys are text as written: YAML reads ``on:`` and ``no:`` as True and False, but a module may have such a
    name. ``fast``: based on libyaml.
    """
    from omegaconf._utils import get_yaml_loader

    own = get_yaml_loader()

    def construct_mapping(loader: Any, node: yaml.MappingNode, deep: bool = False) -> Any:
        _name_by_text(node)
        return own.construct_mapping(loader, node, deep)

    def flatten_mapping(loader: Any, node: yaml.MappingNode) -> None:
        _name_by_text(node)
        own.flatten_mapping(loader, node)

    bases = (yaml.CSafeLoader, own) if fast and yaml.__with_libyaml__ else (own,)
    methods = {"construct_mapping": construct_mapping, "flatten_mapping": flatten_mapping}
    return type("Loader", bases, methods)


def _name_by_text(node: yaml.MappingNode) -> None:
    """Makes every key of ``node`` text; keys that a merge (``<<``) brings become text when it is merged."""
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            key.tag = _TEXT


def composed(path: Path) -> yaml.Node | None:
    """Returns the nodes of ``path`` with the keys that ``load`` reads: merges (``<<``) are carried out.

    Keys that a mapping sets itself follow those that it merges, so the last of equal keys counts.
    """
    text = path.read_text(encoding="utf-8")
    root: yaml.Node | None = yaml.compose(text, Loader=parser(path))
    merging = yaml.SafeLoader("")
    nodes = [root] if root is not None else []
    seen: set[int] = set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            merging.flatten_mapping(node)
            nodes += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return root


def load(path: Path) -> Any:
    """Returns the plain data that OmegaConf reads from ``path``, with keys as written."""
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=_loader(shipped(path)))


BYTES = 4 * 2**20
DEPTH = 40
NODES = 10_000
DIGITS = 1000  # Python's int() accepts 4300 decimal digits, more than a number in base 16 has digits


SIXTIES = re.compile(r"[-+]?\d+(:[0-5]?\d)+(\.\d*)?")
"""Numbers to base 60: YAML reads 12:00:00 as 43200, whatever the unit of the setting."""
EIGHTS = re.compile(r"[-+]?0[0-7_]+")
"""Numbers to base 8: YAML reads 010 as 8."""
INTEGER = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+|[\d_]+)")


class Hostile(Exception):
    """A file that is refused, and the reason."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.text)


def check(path: Path) -> None:
    """Raises ``Hostile`` if ``path`` is refused."""
    problem = hostile(path)
    if problem is not None:
        raise Hostile(problem)


def hostile(path: Path) -> Problem | None:
    """Returns why ``path`` is refused; ``None`` if it is not, or is invalid YAML, which its reader explains.

    An unchanged file is read once: a request is composed again for each cure that is tried.
    """
    try:
        if not path.is_file():
            return Problem("", f"{short(path)}: not a regular file")
        state = path.stat()
        if state.st_size > BYTES:
            return _problem(path, None, f"{state.st_size} bytes; a file of settings has at most {BYTES}")
        return _unchanged(path, os.getcwd(), state.st_ino, state.st_size, state.st_mtime_ns)
    except OSError as error:
        return Problem("", f"{short(path)}: cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return Problem("", f"{short(path)}: not UTF-8 text: byte {error.start} is {byte:#04x}")
    except yaml.YAMLError:
        return None


@lru_cache(256)
def _unchanged(path: Path, here: str, *state: int) -> Problem | None:
    """Returns the problem of a file of this ``state``.

    ``here``: the current folder, which its messages depend on.
    """
    return _walked(path, path.read_text(encoding="utf-8"))


def _walked(path: Path, text: str) -> Problem | None:
    """Counts nodes, including those that aliases refer to, without constructing any."""
    open_nodes: list[tuple[str | None, int]] = []  # the anchor, and the number of nodes before it
    sizes: dict[str | None, int] = {}  # nodes below each anchor
    nodes, aliased = 0, False
    for event in yaml.parse(text, Loader=parser(path)):
        if (tag := _strange_tag(event)) is not None:
            return _problem(path, event, f"the tag {tag} is not read in a file of settings")
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                why = f"*{event.anchor} is inside &{event.anchor}: it would expand without end"
                return _problem(path, event, why)
            nodes += sizes.get(event.anchor, 1)
            aliased = True
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor] = nodes - before
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            sizes[event.anchor] = 1
            if not event.style and len(event.value) > DIGITS and INTEGER.fullmatch(event.value):
                return _problem(
                    path, event, f"a number of {len(event.value)} digits; at most {DIGITS} are read"
                )
            for base, pattern in ((60, SIXTIES), (8, EIGHTS)):
                if not event.style and pattern.fullmatch(event.value):
                    why = f"{event.value} is a number in base {base} in YAML; in quotes it is text"
                    return _problem(path, event, f"{why}: '{event.value}'")
            if not open_nodes and event.value not in ("", "~", "null"):
                return _problem(path, event, "a single value; a file needs a group of keys, as in seed: 0")

        # either would take too much time or memory
        if len(open_nodes) > DEPTH:
            return _problem(path, event, f"nested deeper than {DEPTH} levels")
        if nodes > NODES:
            subject = "its aliases stand for" if aliased else "it contains"
            return _problem(path, event, f"{subject} more than {NODES} values")
    return None


def _strange_tag(event: yaml.Event) -> str | None:
    """Returns the tag that is written at a node, if it is none of ``TAGS``; ``None`` otherwise."""
    tag: str | None = getattr(event, "tag", None)
    known = next((names for kind, names in TAGS.items() if isinstance(event, kind)), ())
    if tag is None or tag == "!" or tag in {_STANDARD + name for name in known}:
        return None
    return tag.replace(_STANDARD, "!!")


def _problem(path: Path, event: yaml.Event | None, text: str) -> Problem:
    mark = None if event is None else event.start_mark
    where = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
    return Problem("", f"{short(path)}{where}: {text}")
