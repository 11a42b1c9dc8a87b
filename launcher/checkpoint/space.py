"""A full disk, told as the file, what it needs and what is free."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def told(path: Path, needed: int) -> Iterator[None]:
    """An ``OSError`` of the block gets the name of ``path``, one of a full disk the bytes needed and free too."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            error.filename = os.fspath(path)
            raise
        text = f"{os.strerror(error.errno)}: the file needs {needed} bytes, {free(path)} are free"
        raise OSError(error.errno, text, os.fspath(path)) from error


def free(path: Path) -> int:
    """Bytes that this user may still write on the disk of ``path``."""
    disk = os.statvfs(path.parent)
    return disk.f_bavail * disk.f_frsize
