"""YAML that no recipe needs, refused before anything reads it: aliases of aliases, deep nesting, endless numbers."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from launcher.errors import Problem
from launcher.job.yaml.shipped import short

BYTES = 4 * 2**20
DEPTH = 40
NODES = 100_000
DIGITS = 4300  # what Python reads, and a number of a recipe never has


class Hostile(Exception):
    """A file that is not read, and why."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.text)


def check(path: Path) -> None:
    """Raises ``Hostile``."""
    if problem := hostile(path):
        raise Hostile(problem)


def hostile(path: Path) -> Problem | None:
    """What keeps ``path`` from being read; ``None`` also for a file that is no YAML, which its reader says better."""
    try:
        if not path.is_file():
            return Problem("", f"{short(path)}: is not a file")
        if (size := path.stat().st_size) > BYTES:
            return _problem(path, None, f"{size} bytes; settings are text of at most {BYTES}")
        return _walked(path, path.read_text(encoding="utf-8"))
    except OSError as error:
        return Problem("", f"{short(path)}: cannot be read: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError):
        return None


def _walked(path: Path, text: str) -> Problem | None:
    """Counts the nodes that the aliases stand for, without making them."""
    open_nodes: list[tuple[str | None, int]] = []  # the anchor, and how many nodes there were before
    sizes: dict[str | None, int] = {}
    nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                return _problem(path, event, f"*{event.anchor} stands within &{event.anchor}: it would have no end")
            nodes += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes |= {anchor: nodes - before} if anchor is not None else {}
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            sizes |= {event.anchor: 1} if event.anchor is not None else {}
            if event.style is None and len(event.value) > DIGITS and re.fullmatch(r"[-+\d_]+", event.value):
                return _problem(path, event, f"a number of {len(event.value)} digits")
        if len(open_nodes) > DEPTH:
            return _problem(path, event, f"nested deeper than {DEPTH} levels")
        if nodes > NODES:
            return _problem(path, event, f"its aliases stand for more than {NODES} values")
    return None


def _problem(path: Path, event: yaml.Event | None, text: str) -> Problem:
    mark = None if event is None else event.start_mark
    where = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
    return Problem("", f"{short(path)}{where}: {text}")
