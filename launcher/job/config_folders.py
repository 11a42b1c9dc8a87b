"""Finds the YAML files of recipes and options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parents[1]
    return next((p for p in (package / name, package.parent / name) if p.is_dir()), package / name)


CONF = _shipped("conf")
RECIPES = _shipped("recipes")


def shipped(path: Path) -> bool:
    """Returns true if ``path`` is one of our files, not the user's.

    ``..`` and links are resolved first: ``recipes/../../theirs.yaml`` is not one of ours.
    """
    real = Path(os.path.realpath(path))
    return real.is_relative_to(CONF) or real.is_relative_to(RECIPES)


def short(path: Path) -> str:
    """Returns ``path`` relative to the current folder or to a shipped one that contains it, else absolute."""
    full = Path(os.path.abspath(path))
    for base in (Path.cwd(), CONF.parent):
        if full.is_relative_to(base):
            return full.relative_to(base).as_posix()
    return str(full)


@dataclass(frozen=True)
class ConfigFiles:
    """The folders to search: the first that contains a file is used. ``conf`` has a subfolder per group."""

    conf: tuple[Path, ...] = (CONF,)
    recipes: tuple[Path, ...] = (RECIPES,)

    @classmethod
    def from_folders(cls, user: Path | None, recipe: Path | None = None) -> ConfigFiles:
        """Returns the shipped folders, the ``user``'s own, and that of a ``recipe`` named by its path.

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
        """Returns the names of groups, such as ``model`` and ``recipe``, sorted."""
        folders = [p for c in self.conf if c.is_dir() for p in c.iterdir() if p.is_dir()]
        names = {p.name for p in folders if p.name[0] not in "._"}
        return tuple(sorted((names | {"recipe"}) - {"recipes"}))

    def options(self, group: str) -> tuple[str, ...]:
        """Returns the names that may follow ``group=``, sorted."""
        if ".." in group.split("/"):
            return ()
        folders = [folder for folder in self._folders(group) if folder.is_dir()]
        names = {p.relative_to(f).with_suffix("").as_posix() for f in folders for p in self._files(f)}
        return tuple(sorted(names))

    def file(self, config_path: str) -> Path | None:
        """Returns the file of Hydra's path ``group/option``; ``None`` if there is none."""
        group, _, option = config_path.rpartition("/")
        folders = self._folders(group) if group else iter(self.conf)
        paths = (folder / f"{option}.yaml" for folder in folders)
        return next((path for path in paths if path.is_file()), None)

    def title(self, config_path: str) -> str:
        """Returns the comment that begins the file of Hydra's path ``group/option``; "" if there is none."""
        path = self.file(config_path)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path else []
        first = next((line for line in lines if not line.startswith("# @package")), "")
        return first.removeprefix("#").strip() if first.startswith("#") else ""

    def hidden(self) -> tuple[str, ...]:
        """Returns the user's files that are never read because a shipped file has the same name."""
        own = ((p, p.relative_to(c)) for c in self.conf[1:] for p in sorted(c.rglob("*.yaml")))
        return tuple(short(p) for p, name in own if (CONF / name).is_file())

    def _files(self, folder: Path) -> Iterator[Path]:
        """Yields the YAML files of ``folder`` and of its subfolders.

        For a recipe that is given by its path, subfolders are left out: ``folder`` may be the user's home.
        """
        kept = (*self.conf, RECIPES, *(c / "recipes" for c in self.conf))
        if any(folder.is_relative_to(k) for k in kept):
            yield from folder.rglob("*.yaml")
        else:
            yield from folder.glob("*.yaml")

    def _folders(self, group: str) -> Iterator[Path]:
        if group == "recipe" or group.startswith("recipe/"):
            yield from (r / group.removeprefix("recipe").lstrip("/") for r in self.recipes)
        yield from (c / group for c in self.conf)
