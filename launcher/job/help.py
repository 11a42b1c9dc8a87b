"""Composes the text of ``--help NAME`` from the files in ``conf/``, which explain groups and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

import yaml

from launcher.errors import Problem, RequestError
from launcher.job.config_folders import CONF, ConfigFiles, shipped
from launcher.job.yaml_limits import parser

REQUIRED = "???"
WIDEST = 46
"""Comments begin right of the longest ``key=default`` that has at most this number of characters."""


@dataclass(frozen=True)
class DocumentedSetting:
    """A key in a file, its default there as written, and the comment next to it. A section has no default."""

    key: str
    default: str
    comment: str

    @property
    def chosen(self) -> bool:
        """Returns true if the setting only names its option, as ``model.name`` does."""
        verb = self.key.startswith("steps.") and self.key.endswith(".kind")
        return verb or (self.key.endswith(".name") and not self.comment)

    @property
    def columns(self) -> tuple[str, str]:
        """Returns the override that sets the default, and the explanation of the setting."""
        if self.default == REQUIRED:
            return f"{self.key}=", f"required; {self.comment}"
        return f"{self.key}={self.default}" if self.default else self.key, self.comment


@dataclass(frozen=True)
class Option:
    """A file of settings: an option of a group, or ``config.yaml``, which belongs to no group."""

    group: str
    name: str
    title: str
    settings: tuple[DocumentedSetting, ...]

    def below(self, name: str) -> tuple[DocumentedSetting, ...]:
        """Returns all settings if ``name`` is this option or its group, else those of the key ``name``."""
        own = name in (self.group, self.name)
        return tuple(s for s in self.settings if own or f"{s.key}.".startswith(f"{name}."))

    @property
    def override(self) -> str:
        return f"steps=[{self.name}]" if self.group == "steps" else f"{self.group}={self.name}"


def settings(path: Path, package: str) -> Iterator[DocumentedSetting]:
    """Yields every key of a shipped file, below its ``package``."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for key, name, value in _nodes(yaml.compose(text, Loader=parser(path)), package):
        number = name.start_mark.line
        start, end = value.start_mark, value.end_mark
        section = isinstance(value, yaml.MappingNode) and not value.flow_style
        default = "" if section else lines[number][start.column : end.column].strip()
        yield DocumentedSetting(
            key, default, _comment(lines[number:], name.end_mark.column if section else end.column)
        )


def _comment(lines: Sequence[str], after: int) -> str:
    """Returns the comment of the first line, behind the column ``after``, with the lines that continue it."""
    column = lines[0].find("#", after)
    if column < 0:
        return ""
    blank = " " * column
    more = takewhile(lambda line: line.startswith(f"{blank}#"), lines[1:])
    return " ".join(line[column + 1 :].strip() for line in (lines[0], *more))


def _nodes(node: yaml.Node | None, above: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yields every key below a mapping in block form: its dotted name, and the nodes of key and value."""
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        return
    for name, value in node.value:
        if name.value != "defaults":
            key = f"{above}.{name.value}" if above else name.value
            yield key, name, value
            yield from _nodes(value, key)


@lru_cache(1)
def options(configs: ConfigFiles) -> tuple[Option, ...]:
    """Returns ``config.yaml``, and every option of every group. The user's own files have only a title."""
    return (Option("", "", "", tuple(settings(CONF / "config.yaml", ""))), *_options(configs))


def _options(configs: ConfigFiles) -> Iterator[Option]:
    for group in configs.groups():
        package = "parallel.operators" if group == "operators" else group
        for name in configs.options(group):
            path = configs.file(f"{group}/{name}")
            read = path is not None and group != "recipe" and shipped(path)
            keys = tuple(settings(path, package)) if path is not None and read else ()
            yield Option(group, name, configs.title(f"{group}/{name}"), keys)


def explain(name: str, configs: ConfigFiles) -> str:
    """Returns the settings of a group, a section, a key or an option, with defaults and comments.

    Raises ``RequestError`` if ``name`` is none of them.
    """
    if blocks := list(_blocks(name, options(configs))):
        return ("\n\n" if any("\n" in block for block in blocks) else "\n").join(blocks)

    # a key of a group that is null by default is explained next to the group
    from launcher.job.completion import noted

    if any(key == name for key, _ in noted()):
        return explain(name.rpartition(".")[0], configs)
    raise RequestError((_unknown(name, configs),))


def _blocks(name: str, every: tuple[Option, ...]) -> Iterator[str]:
    for option in every:
        shown = option.below(name)
        own = name in (option.group, option.name)
        if not shown and not own:
            continue
        rows = [s.columns for s in shown if (s.default or s.comment) and not s.chosen]
        width = max((len(key) for key, _ in rows if len(key) <= WIDEST), default=0)
        lines = [f"{key:<{width}}  {right}" for key, right in rows]
        if option.group:
            lines = [f"{option.override}  # {option.title}", *(f"  {line}" for line in lines)]
        yield "\n".join(lines)


def _unknown(name: str, configs: ConfigFiles) -> Problem:
    """Returns the problem of a name that is no group, key or option, with the name that may be meant."""
    from launcher.job.cures.keys_of_other_programs import why_not
    from launcher.job.schema.did_you_mean import did_you_mean, nearest
    from launcher.job.schema.job import Job
    from launcher.job.schema.keys import fields
    from launcher.job.stray_arguments import KnownNames

    groups = tuple(dict.fromkeys((*fields(Job), *configs.groups())))
    recipes = configs.options("recipe")
    reason = why_not(name)
    meant = None if reason else KnownNames(configs.groups(), recipes).meant(name)
    if not reason and meant is None:
        meant = nearest(name, (*groups, *(o for g in configs.groups() for o in configs.options(g))))
    text = f"{name}: no group, setting or option has this name{did_you_mean(meant)}"
    text += f"; {reason}" if reason else f" (groups and settings: {', '.join(groups)})"
    return Problem("", text, f"--help {meant}" if meant else "", (name,))
