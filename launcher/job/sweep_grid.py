"""The runs that a sweep stands for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as Parsed
from hydra.errors import HydraException

from launcher.errors import Problem, RequestError
from launcher.job.overrides.grammar import read
from launcher.job.schema import redact
from launcher.job.stray_arguments import KnownNames, sift
from launcher.job.yaml.config_files import ConfigFiles


@dataclass(frozen=True)
class Cell:
    """``overrides`` make the run, ``varied`` are those that differ between cells."""

    name: str
    overrides: tuple[str, ...]
    varied: tuple[str, ...]


def cells(overrides: Sequence[str], configs: ConfigFiles) -> tuple[Cell, ...]:
    """Every combination, the last override varying fastest; cells are named by what varies."""
    found: list[Problem] = []
    single = sift(overrides, KnownNames(configs.groups(), configs.options("recipe")), found)
    lists = [_values(o, configs, found) for o in single]
    if found:
        raise RequestError(tuple(found))
    many = [i for i, values in enumerate(lists) if len(values) > 1]
    grid = list(itertools.product(*lists))
    return tuple(Cell(_slug(k, [c[i] for i in many]), c, tuple(c[i] for i in many)) for k, c in enumerate(grid))


def _values(text: str, configs: ConfigFiles, found: list[Problem]) -> list[str]:
    """The overrides that one override of a sweep stands for."""

    class Options:
        """What the grammar asks for ``glob(...)``."""

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


def _slug(k: int, varied: Sequence[str]) -> str:
    words = [v.partition("=")[2] for v in varied if not redact.secret(v.partition("=")[0])]
    text = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", w).strip("_.") for w in words)
    return f"{k}-{text[:80]}".rstrip("-")
