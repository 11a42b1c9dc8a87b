"""Writes below a run folder: never through a link, and never at the path of one that was moved or replaced.

Everything that the launcher opens for writing, makes, renames or deletes in a run folder goes through
``open_file``, ``make_folder`` or ``pinned``. They start at a descriptor that was opened when the run began,
and open one folder after the other without following links. So a link that appears during the run is
refused, and what it leads to is not changed, even if it appears between two system calls.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import RunError
from launcher.untrusted.files import open_below, open_entry, open_folder

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
    descriptor: int

    def inside(self, path: Path) -> Path:
        """Returns ``path``, which is in the folder, relative to it."""
        return Path(os.path.abspath(path)).relative_to(self.absolute)


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
    """Makes the functions of this module refuse links below ``folder``, and all of it once it has been moved.

    They refuse them within the block and in processes that are forked in it. Raises ``FolderMoved`` if the
    folder does not exist at the start.
    """
    try:
        descriptor = open_folder(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise FolderMoved(str(folder)) from None
    about = os.fstat(descriptor)
    watch = _Watched(folder, os.path.abspath(folder), (about.st_dev, about.st_ino), descriptor)
    _watched.append(watch)
    try:
        yield
    finally:
        _watched.remove(watch)
        os.close(descriptor)


def check(path: Path) -> None:
    """Raises ``FolderMoved`` if ``path`` is below a watched folder that is not at its path any more."""
    for watch in _above(path):
        still_there(watch.folder, watch.began)


def open_file(path: Path, flags: int, mode: int = 0o666) -> int:
    """Opens a file, or a folder, as ``os.open`` does; below a watched folder no link is followed.

    With ``O_NOFOLLOW`` a file elsewhere must not be a link either. Raises ``RefusedFile`` for a link and
    ``FolderMoved`` as ``check`` does.
    """
    watch = _innermost(path)
    if watch is None and flags & os.O_NOFOLLOW:
        return open_below(path.parent, path.name, flags, mode)
    if watch is None:
        return os.open(path, flags | os.O_CLOEXEC, mode)
    check(path)
    inside = watch.inside(path)
    if not inside.parts:
        return os.dup(watch.descriptor)
    return open_below(watch.folder, inside, flags, mode, opened=watch.descriptor)


@contextmanager
def pinned(path: Path) -> Iterator[Path]:
    """Yields another path to the same entry, on which no link below a watched folder is followed.

    The entry itself may be a link, or not exist: to rename and to delete it is safe, to open it is not. Its
    folder stays the same while the block runs, wherever it is moved. Errors of the block name ``path``.
    Raises as ``open_file`` does.
    """
    watch = _innermost(path)
    if watch is None or not watch.inside(path).parts:
        check(path)
        yield path
        return
    folder = open_file(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    at = f"/proc/self/fd/{folder}"
    try:
        # without /proc the path itself must do: a link that appears in the block is then followed
        yield Path(at, path.name) if os.path.isdir(at) else path
    except OSError as error:
        for name in ("filename", "filename2"):
            value = getattr(error, name)
            if value is not None and os.fsdecode(value).startswith(f"{at}/"):
                setattr(error, name, f"{path.parent}{os.fsdecode(value)[len(at) :]}")
        raise
    finally:
        os.close(folder)


def make_folder(folder: Path) -> None:
    """Makes ``folder`` and its missing parents, but never a watched folder itself.

    Raises as ``open_file`` does.
    """
    watch = _innermost(folder)
    if watch is None:
        folder.mkdir(parents=True, exist_ok=True)
        return

    # one level at a time below the innermost watched folder: ``parents=True`` would make that folder again
    check(folder)
    at, above = watch.folder, os.dup(watch.descriptor)
    try:
        for part in watch.inside(folder).parts:
            at /= part
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=above)
            above, outer = open_entry(at, part, os.O_RDONLY | os.O_DIRECTORY, above), above
            os.close(outer)
    except NotADirectoryError:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(at)) from None
    except FileNotFoundError:
        check(folder)
        raise
    finally:
        os.close(above)
    check(folder)


def below(path: Path) -> bool:
    """Returns true if ``path`` is a watched folder, or below one."""
    return _innermost(path) is not None


def _innermost(path: Path) -> _Watched | None:
    return max(_above(path), key=lambda watch: len(watch.absolute), default=None)


def _above(path: Path) -> list[_Watched]:
    absolute = os.path.abspath(path)
    return [w for w in _watched if absolute == w.absolute or absolute.startswith(w.absolute + os.sep)]
