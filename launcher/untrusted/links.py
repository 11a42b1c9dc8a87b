"""Writes files below an untrusted folder, never through a symbolic link."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from launcher.untrusted.files import RefusedFile

LINK = "a link, which is not followed: what it leads to may be somebody's; remove it"


def open_below(
    folder: Path, name: str | os.PathLike[str], flags: int, mode: int = 0o666, *, opened: int | None = None
) -> int:
    """Opens the file ``name`` of ``folder`` and returns its descriptor. ``folder`` itself may be a link.

    ``opened``: a descriptor of ``folder``, which may have been moved since.
    Raises ``RefusedFile`` if the file, or a folder between ``folder`` and it, is a link.
    """
    path = Path(name)
    *above, last = path.parts
    fd = open_folder(folder) if opened is None else os.dup(opened)
    at = folder
    try:
        for part in above:
            at /= part
            fd, outer = _opened(at, part, os.O_RDONLY | os.O_DIRECTORY, fd), fd
            os.close(outer)
        return _opened(folder / path, last, flags, fd, mode)
    finally:
        os.close(fd)


def open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _opened(path: Path, name: str, flags: int, folder: int, mode: int = 0o666) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise RefusedFile(path, LINK) from error
        error.filename = str(path)
        raise


def links(folder: Path) -> Iterator[Path]:
    """Yields the links in ``folder`` and below; only ``folder`` itself if it is a link."""
    if folder.is_symlink():
        yield folder
        return
    try:
        entries = [*os.scandir(folder)]
    except NotADirectoryError:
        return
    for entry in entries:
        if entry.is_symlink():
            yield Path(entry.path)
        elif entry.is_dir(follow_symlinks=False):
            yield from links(Path(entry.path))
