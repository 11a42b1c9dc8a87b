"""``init FOLDER``: writes a starter project, either all of its files or none."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from launcher.console import say
from launcher.errors import DONE, Problem, RequestError
from launcher.job.schema.paths import unusable

PROJECT = Path(__file__).parent / "project"


def carry_out(words: Sequence[str]) -> int:
    """Runs ``init FOLDER``, for a folder that is empty or does not exist. Raises ``RequestError``."""
    name, *rest = words
    if len(rest) != 1 or not rest[0] or rest[0].startswith("-"):
        raise _folder_error(f"{name}: needs one folder, as in: launcher {name} my_project", words)
    if why := unusable(rest[0]):
        raise _folder_error(f"{rest[0]}: {why}", words)
    folder = Path(rest[0])
    try:
        if any(p.is_file() for p in (folder, *folder.parents)):
            raise _folder_error(
                f"{folder}: this path, or a part of it, is a file; give another folder", words
            )
        if folder.is_dir() and any(folder.iterdir()):
            raise _folder_error(f"{folder}: not empty; give a new or an empty folder", words)
        written = write(folder)
    except OSError as error:  # nothing was written
        raise _folder_error(f"{folder}: cannot be written: {error.strerror}", words) from error
    change_folder = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}, then "
    say(f"{folder}: {', '.join(written)}\nnext: {change_folder}run the commands in README.md")
    return DONE


def write(folder: Path) -> list[str]:
    """Writes the files; returns their names. If it raises ``OSError``, it leaves nothing behind.

    A new folder appears with all files at once. An existing one is kept: it may be a shell's folder.
    """
    folder = Path(os.path.realpath(folder))
    filled = folder.is_dir()
    made = [] if filled else _make(folder.parent)
    try:
        with TemporaryDirectory(prefix=".new-", dir=folder if filled else folder.parent) as beside:
            new = Path(beside) / "project"
            new.mkdir()
            names = [shutil.copyfile(p, new / p.name).name for p in sorted(PROJECT.iterdir()) if p.is_file()]
            _move(new, folder) if filled else new.rename(folder)
    except BaseException:
        for path in made:
            path.rmdir()
        raise
    return names


def _move(new: Path, folder: Path) -> None:
    moved: list[Path] = []
    try:
        for path in sorted(new.iterdir()):
            moved.append(path.rename(folder / path.name))
    except BaseException:
        for path in moved:
            path.unlink()
        raise


def _make(folder: Path) -> list[Path]:
    """Makes ``folder`` and its parents; returns the new ones, innermost first."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return new


def _folder_error(text: str, words: Sequence[str]) -> RequestError:
    return RequestError((Problem("", text, "", tuple(words)),))
