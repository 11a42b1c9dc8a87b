"""The configuration files at hand: shipped ones first, then the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.job.yaml.shipped import CONF, RECIPES, short


@dataclass(frozen=True)
class ConfigFiles:
    """``conf`` holds one folder a group, ``recipes`` the options of ``recipe``; the first folder with a file wins."""

    conf: tuple[Path, ...] = (CONF,)
    recipes: tuple[Path, ...] = (RECIPES,)

    @classmethod
    def of(cls, user: Path | None, recipe: Path | None = None) -> ConfigFiles:
        """With the user's own folder (recipes in its ``recipe`` or ``recipes``) and that of a recipe named by path."""
        own = () if user is None else (Path(os.path.realpath(user)),)
        more = tuple(p for u in own for p in (u / "recipes",) if p.is_dir())
        return cls((CONF, *own), (*((Path(os.path.realpath(recipe)),) if recipe else ()), RECIPES, *more))

    def groups(self) -> tuple[str, ...]:
        """Names such as ``model`` and ``recipe``, sorted."""
        folders = {p.name for c in self.conf if c.is_dir() for p in c.iterdir() if p.is_dir() and p.name[0] not in "._"}
        return tuple(sorted((folders | {"recipe"}) - {"recipes"}))

    def options(self, group: str) -> tuple[str, ...]:
        """Names that may follow ``group=``, sorted."""
        files = ((f, p) for f in self._folders(group) if f.is_dir() for p in f.rglob("*.yaml"))
        names = {p.relative_to(f).with_suffix("").as_posix() for f, p in files}
        return tuple(sorted(names))

    def file(self, config_path: str) -> Path | None:
        """The file behind Hydra's path ``group/option``."""
        group, _, option = config_path.rpartition("/")
        places = self.conf if not group else tuple(self._folders(group))
        return next((p for f in places if (p := f / f"{option}.yaml").is_file()), None)

    def hidden(self) -> tuple[str, ...]:
        """Files of the user's that a shipped file of the same name keeps from being read."""
        own = ((p, p.relative_to(c)) for c in self.conf[1:] for p in sorted(c.rglob("*.yaml")))
        return tuple(short(p) for p, name in own if (CONF / name).is_file())

    def _folders(self, group: str) -> Iterator[Path]:
        if group == "recipe" or group.startswith("recipe/"):
            yield from (r / group.removeprefix("recipe").lstrip("/") for r in self.recipes)
        yield from (c / group for c in self.conf)
