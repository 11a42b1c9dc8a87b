"""Room on a disk, taken in advance; without it the error says the file, what it needs and what is free."""

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
BLOCK = 4096  # bytes that a file or a folder takes at least
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS)


class Unwritten(OSError, RunError):
    """A file of ours that cannot be written.

    Its text says all that the user has to know: no traceback is needed.
    """

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def told(path: Path, needed: int) -> Iterator[None]:
    """An ``OSError`` of the block is ``Unwritten`` of ``path``; of a full disk, with the bytes ``needed``."""
    try:
        yield
    except (Unwritten, RefusedFile):
        raise
    except OSError as error:
        raise _of(error, path, needed) from error


def unwritten(error: BaseException) -> Unwritten | None:
    """``error`` itself, or what says so when it is of a disk and comes from code of ours or of torch."""
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
    """Make an empty file ``size`` bytes long, with room for them where the file system can promise it.

    A full disk is known before the first byte, and ext4 takes half the time to write where there is room
    already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    take = getattr(libc, "fallocate", None)  # posix_fallocate may write every block itself
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
    """Bytes that this user may still write on the disk of ``path``."""
    disk = os.statvfs(next(p for p in path.absolute().parents if p.is_dir()))
    return disk.f_bavail * disk.f_frsize
