"""Resolves a path to files: it may be a file, a folder of files, a pattern or a list."""

from __future__ import annotations

import glob
import re
from collections import Counter
from pathlib import Path

from launcher.data.files.bad_file import BadFile
from launcher.job.schema.components import Paths

SUFFIXES = (".tokens", ".bin")
_HELD_OUT = re.compile(r"(?<![a-z])(val|valid|validation|test|dev|eval)(?![a-z])")


def files(paths: Paths, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files in the order of ``paths``; those of a folder or pattern by name, with ``suffixes`` only.

    Raises ``BadFile`` with the path.
    """
    each = [paths] if isinstance(paths, str) else paths
    found = [file for path in each for file in _of(path, suffixes)]
    twice = [file for file, n in Counter(f.resolve() for f in found).items() if n > 1]
    if twice:
        raise BadFile(f"{twice[0]}: named twice")
    return found


def _of(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    here = Path(path)
    if here.is_dir():
        return _in_folder(here, suffixes)
    if here.exists():
        return [here.with_suffix(".bin") if here.suffix == ".idx" else here]
    if glob.has_magic(path):
        return _matching(path, suffixes)
    prefix = Path(f"{path}.bin")  # Megatron names two files by their common prefix
    return [prefix] if prefix.exists() and Path(f"{path}.idx").exists() else [here]


def _matching(pattern: str, suffixes: tuple[str, ...]) -> list[Path]:
    found = sorted(Path(name) for name in glob.glob(pattern) if name.endswith(suffixes))
    if not found:
        raise BadFile(f"{pattern}: no {' or '.join(suffixes)} file has such a name")
    return found


def _in_folder(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a folder. Raises ``BadFile`` if only some are named as validation data."""
    found = sorted(f for f in folder.iterdir() if f.name.endswith(suffixes) and not f.name.startswith("."))
    if not found:
        raise BadFile(f"{folder}: no {' or '.join(suffixes)} file is in this folder")
    held = [f for f in found if _HELD_OUT.search(f.stem.lower())]
    if held and len(held) < len(found):
        text = f"{folder}: {held[0].name} is named as held out, {_other(found, held).name} is not"
        raise BadFile(f"{text}: name the files of each by a pattern, {folder}/NAME*{held[0].suffix}")
    return found


def _other(found: list[Path], held: list[Path]) -> Path:
    return next(f for f in found if f not in held)
