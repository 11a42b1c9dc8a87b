"""Chooses the parser of a YAML file: libyaml for shipped files, which is ten times as fast, else Python's.

Both give the same result for the shipped files, which a test compares. In rare cases, and in their messages,
they differ: a user's file must mean the same on every machine, with or without libyaml.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from launcher.job.yaml.shipped import shipped


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
