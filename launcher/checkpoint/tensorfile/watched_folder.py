"""Refuses to write at the path of a run folder that was moved or replaced during the run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import RunError

Identity = tuple[int, int]
MOVED = "the run folder was deleted or moved during the run"


class FolderMoved(OSError, RunError):
    """Raised instead of writing below a run folder that has been deleted, moved or replaced."""

    def __init__(self, folder: str) -> None:
        super().__init__(errno.ENOENT, MOVED, folder)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"

    def __reduce__(self) -> tuple[type[FolderMoved], tuple[str]]:
        return FolderMoved, (str(self.filename),)


@dataclass(frozen=True)
class _Watched:
    folder: Path
    absolute: str
    began: Identity


_watched: list[_Watched] = []
"""The folders that this process watches, in all of its threads."""


def identity(folder: Path) -> Identity | None:
    """Returns a folder's device and inode, which identify it while it exists; ``None`` if it does not."""
    try:
        about = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return about.st_dev, about.st_ino


def still_there(folder: Path, began: Identity | None) -> None:
    """Raises ``FolderMoved`` unless ``folder`` has the ``identity`` that it had when the run began."""
    if not folder.is_dir() or identity(folder) != began:
        raise FolderMoved(str(folder))


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Makes ``check`` and ``make_folder`` refuse paths below ``folder`` once it has been moved or replaced.

    They refuse them within the block and in processes that are forked in it. Raises ``FolderMoved`` if the
    folder does not exist at the start.
    """
    began = identity(folder)
    if began is None:
        raise FolderMoved(str(folder))
    watch = _Watched(folder, os.path.abspath(folder), began)
    _watched.append(watch)
    try:
        yield
    finally:
        _watched.remove(watch)


def check(path: Path) -> None:
    """Raises ``FolderMoved`` if ``path`` is below a watched folder that is not at its path any more."""
    for watch in _above(path):
        still_there(watch.folder, watch.began)


def make_folder(folder: Path) -> None:
    """Makes ``folder`` and its missing parents, but never a watched folder itself.

    Raises ``FolderMoved`` as ``check`` does.
    """
    above = _above(folder)
    if not above:
        folder.mkdir(parents=True, exist_ok=True)
        return

    # one level at a time below the innermost watched folder: ``parents=True`` would make that folder again
    check(folder)
    path = max((watch.absolute for watch in above), key=len)
    try:
        for part in Path(os.path.abspath(folder)).relative_to(path).parts:
            path = os.path.join(path, part)
            Path(path).mkdir(exist_ok=True)
    except FileNotFoundError:
        check(folder)
        raise


def _above(path: Path) -> list[_Watched]:
    absolute = os.path.abspath(path)
    return [w for w in _watched if absolute == w.absolute or absolute.startswith(w.absolute + os.sep)]
