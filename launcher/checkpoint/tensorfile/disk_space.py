"""Reserves disk space in advance; errors name the file, the bytes that it needs and those that are free."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import RunError, users_frame
from launcher.untrusted.files import RefusedFile

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BROKEN = (errno.EROFS, errno.EIO, errno.ESTALE)
BLOCK = 4096  # the fewest bytes that a file or a folder takes
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS)


class Unwritten(OSError, RunError):
    """Raised for a file of ours that cannot be written.

    Its text contains all that the user needs; no traceback is shown.
    """

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def told(path: Path, needed: int) -> Iterator[None]:
    """Turns an ``OSError`` of the block into ``Unwritten`` for ``path``.

    If the disk is full, the message has the bytes ``needed`` and those that are free.
    """
    try:
        yield
    except (Unwritten, RefusedFile):
        raise
    except OSError as error:
        raise _of(error, path, needed) from error


def unwritten(error: BaseException) -> Unwritten | None:
    """Returns ``error`` as ``Unwritten`` if it is a disk error raised by our code or torch, else ``None``."""
    if isinstance(error, Unwritten):
        return error
    if not isinstance(error, OSError) or error.errno not in (*FULL, *BROKEN):
        return None
    if users_frame(error) is not None:
        return None
    if error.filename is None:
        return Unwritten(error.errno, os.strerror(error.errno), "a file")
    return _of(error, Path(error.filename), BLOCK)


def _of(error: OSError, path: Path, needed: int) -> Unwritten:
    code = error.errno or errno.EIO
    why = _reason(code, path, needed) if code in FULL else os.strerror(code)
    return Unwritten(code, why, os.fspath(path))


def _reason(code: int, path: Path, needed: int) -> str:
    room = f"{free(path)} are free"
    if code == errno.EFBIG:
        room = f"{resource.getrlimit(resource.RLIMIT_FSIZE)[0]} are allowed (ulimit -f)"
    return f"{os.strerror(code)}: the file needs {needed} bytes, {room}"


def reserve(fd: int, size: int) -> None:
    """Extends an empty file to ``size`` bytes, and allocates them if the file system can.

    A full disk is then noticed before the first byte is written, and ext4 writes allocated blocks in half the
    time.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    take = getattr(libc, "fallocate", None)  # not posix_fallocate, which may write every block
    code = errno.ENOSYS
    while take is not None:
        failed = take(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0
        code = ctypes.get_errno() if failed else 0
        if code != errno.EINTR:
            break

    if code in _CANNOT:
        os.ftruncate(fd, size)
    elif code:
        raise OSError(code, os.strerror(code))


def free(path: Path) -> int:
    """Returns the bytes that this user may still write to the disk of ``path``."""
    disk = os.statvfs(next(p for p in path.absolute().parents if p.is_dir()))
    return disk.f_bavail * disk.f_frsize
