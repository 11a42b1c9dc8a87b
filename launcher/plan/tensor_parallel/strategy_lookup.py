"""The strategy of a module: by its name, by a glob, or from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from launcher.plan.values.module_names import globs
from launcher.plan.values.resolved import Origins, StrategyOrigin


@dataclass(frozen=True)
class StrategyLookup:
    """Finds the strategy of a module: by the request's names, then its globs (last one first), then files."""

    names: frozenset[str]
    patterns: tuple[str, ...]
    from_files: frozenset[str]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], origins: Origins) -> StrategyLookup:
        requested = [k for k in config if k not in origins]
        return cls(frozenset(requested), globs(requested), frozenset(config.keys() - {*requested}))

    def key(self, module: str) -> str | None:
        """Returns the name or glob of the strategy for ``module``, or ``None``."""
        if module in self.names:
            return module
        glob = next((k for k in self.patterns if fnmatchcase(module, k)), None)
        return module if glob is None and module in self.from_files else glob


def written_under(module: str, key: str, origin: StrategyOrigin | None) -> str:
    """Returns the name or glob that the plan shows: the one in the file if it matches, else ``key``."""
    under = origin.key if origin is not None else ""
    return under if under and fnmatchcase(module, under) else key
