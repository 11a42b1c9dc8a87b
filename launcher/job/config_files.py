"""Finds YAML files and reads them within bounds.

Both give the same result for the shipped files, which a test compares. In rare cases, and in their messages,
they differ: a user's file must mean the same on every machine, with or without libyaml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from launcher.errors import Problem


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parents[1]
    return next((p for p in (package / name, package.parent / name) if p.is_dir()), package / name)


CONF = _shipped("conf")
RECIPES = _shipped("recipes")


def shipped(path: Path) -> bool:
    """Whether ``path`` is one of our files, not the user's."""
    return path.is_relative_to(CONF) or path.is_relative_to(RECIPES)


def short(path: Path) -> str:
    """``path`` relative to the current folder or the shipped ones if it is inside, otherwise absolute."""
    full = Path(os.path.abspath(path))
    for base in (Path.cwd(), CONF.parent):
        if full.is_relative_to(base):
            return full.relative_to(base).as_posix()
    return str(full)


@dataclass(frozen=True)
class ConfigFiles:
    """The folders to search; the first with a file wins. ``conf`` has a subfolder per group."""

    conf: tuple[Path, ...] = (CONF,)
    recipes: tuple[Path, ...] = (RECIPES,)

    @classmethod
    def of(cls, user: Path | None, recipe: Path | None = None) -> ConfigFiles:
        """The shipped folders, the ``user``'s own, and the folder of a ``recipe`` that is given by its path.

        The user's recipes are in the subfolder ``recipe`` or ``recipes``.
        """
        conf = [CONF]
        recipes = [RECIPES]
        if user is not None:
            own = Path(os.path.realpath(user))
            conf.append(own)
            if (own / "recipes").is_dir():
                recipes.append(own / "recipes")
        if recipe is not None:
            recipes.insert(0, Path(os.path.realpath(recipe)))
        return cls(tuple(conf), tuple(recipes))

    def groups(self) -> tuple[str, ...]:
        """The names of groups, such as ``model`` and ``recipe``, sorted."""
        folders = [p for c in self.conf if c.is_dir() for p in c.iterdir() if p.is_dir()]
        names = {p.name for p in folders if p.name[0] not in "._"}
        return tuple(sorted((names | {"recipe"}) - {"recipes"}))

    def options(self, group: str) -> tuple[str, ...]:
        """The names that may follow ``group=``, sorted."""
        folders = [folder for folder in self._folders(group) if folder.is_dir()]
        names = {p.relative_to(f).with_suffix("").as_posix() for f in folders for p in f.rglob("*.yaml")}
        return tuple(sorted(names))

    def file(self, config_path: str) -> Path | None:
        """The file of Hydra's path ``group/option``; ``None`` if there is none."""
        group, _, option = config_path.rpartition("/")
        folders = self._folders(group) if group else iter(self.conf)
        paths = (folder / f"{option}.yaml" for folder in folders)
        return next((path for path in paths if path.is_file()), None)

    def hidden(self) -> tuple[str, ...]:
        """The user's files that are never read because a shipped file has the same name."""
        own = ((p, p.relative_to(c)) for c in self.conf[1:] for p in sorted(c.rglob("*.yaml")))
        return tuple(short(p) for p, name in own if (CONF / name).is_file())

    def _folders(self, group: str) -> Iterator[Path]:
        if group == "recipe" or group.startswith("recipe/"):
            yield from (r / group.removeprefix("recipe").lstrip("/") for r in self.recipes)
        yield from (c / group for c in self.conf)


def parser(path: Path) -> Any:
    """The loader class for events and nodes of ``path``."""
    return yaml.CSafeLoader if yaml.__with_libyaml__ and shipped(path) else yaml.SafeLoader


@lru_cache(1)
def _omegaconf() -> Any:
    """OmegaConf's loader, which has its own rules for numbers, dates and duplicate keys, based on libyaml."""
    from omegaconf._utils import get_yaml_loader

    own = get_yaml_loader()
    return type("FastLoader", (yaml.CSafeLoader, own), {}) if yaml.__with_libyaml__ else own


def load(path: Path) -> Any:
    """The plain data that OmegaConf reads from the shipped file ``path``."""
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=_omegaconf())


BYTES = 4 * 2**20
DEPTH = 40
NODES = 10_000
DIGITS = 4300  # the limit of Python's int(); numbers in recipes are shorter


SIXTIES = re.compile(r"[-+]?\d+(:[0-5]?\d)+(\.\d*)?")
"""Numbers to base 60: YAML reads 12:00:00 as 43200, whatever the unit of the setting."""


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
    """Why ``path`` is refused; ``None`` if it is not, or is invalid YAML, which its reader explains."""
    try:
        if not path.is_file():
            return Problem("", f"{short(path)}: is not a file")
        size = path.stat().st_size
        if size > BYTES:
            return _problem(path, None, f"{size} bytes; settings are text of at most {BYTES}")
        return _walked(path, path.read_text(encoding="utf-8"))
    except OSError as error:
        return Problem("", f"{short(path)}: cannot be read: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError):
        return None


def _walked(path: Path, text: str) -> Problem | None:
    """Counts nodes, including those that aliases refer to, without constructing any."""
    open_nodes: list[tuple[str | None, int]] = []  # the anchor, and the number of nodes before it
    sizes: dict[str | None, int] = {}  # nodes below each anchor
    nodes, aliased = 0, False
    for event in yaml.parse(text, Loader=parser(path)):
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                why = f"*{event.anchor} stands within &{event.anchor}: it would have no end"
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
            if not event.style and len(event.value) > DIGITS and re.fullmatch(r"[-+\d_]+", event.value):
                return _problem(path, event, f"a number of {len(event.value)} digits")
            if not event.style and SIXTIES.fullmatch(event.value):
                why = f"{event.value} is a number to base 60 in YAML; in quotes it is text: '{event.value}'"
                return _problem(path, event, why)

        # either would take too much time or memory
        if len(open_nodes) > DEPTH:
            return _problem(path, event, f"nested deeper than {DEPTH} levels")
        if nodes > NODES:
            what = "its aliases stand for" if aliased else "it has"
            return _problem(path, event, f"{what} more than {NODES} values")
    return None


def _problem(path: Path, event: yaml.Event | None, text: str) -> Problem:
    mark = None if event is None else event.start_mark
    where = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
    return Problem("", f"{short(path)}{where}: {text}")
