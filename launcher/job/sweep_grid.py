"""Expands the overrides of a sweep into the grid of its runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as Parsed
from hydra.errors import HydraException

from launcher.errors import Problem, problems
from launcher.job.overrides.grammar import read
from launcher.job.schema import redact
from launcher.job.stray_arguments import KnownNames, sift
from launcher.job.yaml.config_files import ConfigFiles


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. ``varied``: those of its overrides that differ between the cells."""

    name: str
    overrides: tuple[str, ...]
    varied: tuple[str, ...]


def cells(overrides: Sequence[str], configs: ConfigFiles) -> tuple[Cell, ...]:
    """Every combination, the last override varying fastest; cells are named by what varies.

    Raises ``RequestError``.
    """
    with problems() as found:
        single = sift(overrides, KnownNames(configs.groups(), configs.options("recipe")), found)
        lists = [_values(o, configs, found) for o in single]
    varying = [i for i, values in enumerate(lists) if len(values) > 1]
    out = []
    for k, combination in enumerate(itertools.product(*lists)):
        varied = tuple(combination[i] for i in varying)
        out.append(Cell(_name(k, varied), combination, varied))
    return tuple(out)


def _values(text: str, configs: ConfigFiles, found: list[Problem]) -> list[str]:
    """One override for each value that an override of a sweep lists."""

    class Options:
        """The loader that Hydra's grammar asks for the options behind ``glob(...)``."""

        def get_group_options(self, group_name: str, results_filter: object = None) -> list[str]:
            return list(configs.options(group_name))

    try:
        parsed: Parsed = OverridesParser.create(config_loader=cast(Any, Options())).parse_overrides([text])[0]
    except HydraException:
        read([text], found)
        return [text]
    if not parsed.is_sweep_override():
        return [text]
    if not parsed.is_discrete_sweep():
        key = parsed.key_or_group
        found.append(Problem(key, f"{parsed.get_value_string()}: has no list of values; write {key}=A,B"))
        return [text]
    values = [f"{parsed.get_key_element()}={v}" for v in parsed.sweep_string_iterator()]
    if not values:
        found.append(Problem(parsed.key_or_group, f"{parsed.get_value_string()}: matches nothing"))
    return values


def _name(k: int, varied: Sequence[str]) -> str:
    """Number ``k`` and the values that vary, without secrets, in letters that a path may have."""
    words = [v.partition("=")[2] for v in varied if not redact.secret(v.partition("=")[0])]
    text = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", w).strip("_.") for w in words)
    return f"{k}-{text[:80]}".rstrip("-")
