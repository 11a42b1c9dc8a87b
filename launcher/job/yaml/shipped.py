"""Locates the shipped ``conf`` and ``recipes``: in an installed package, or beside it in a checkout."""

from __future__ import annotations

import os
from pathlib import Path


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parents[2]
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
