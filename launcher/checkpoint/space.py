"""Room on a disk: taken in advance, and when there is none, told as the file, what it needs and what is free."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS)


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


def reserve(fd: int, size: int) -> None:
    """Make an empty file ``size`` bytes long, with room for all of them where the file system can promise that.

    A full disk is known before the first byte, and ext4 takes half the time to write where there is room already.
    """
    take = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)  # posix_fallocate may write every block itself
    code = errno.ENOSYS
    while take is not None:
        code = 0 if take(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0 else ctypes.get_errno()
        if code != errno.EINTR:
            break
    if code in _CANNOT:
        os.ftruncate(fd, size)
    elif code:
        raise OSError(code, os.strerror(code))


def free(path: Path) -> int:
    """Bytes that this user may still write on the disk of ``path``."""
    disk = os.statvfs(path.parent)
    return disk.f_bavail * disk.f_frsize
