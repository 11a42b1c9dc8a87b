"""Writes files so that they survive a crash, reserves disk space in advance, and parses JSON files."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

from launcher.checkpoint.tensorfile import watched_folder
from launcher.checkpoint.tensorfile.watched_folder import pinned
from launcher.errors import RunError
from launcher.untrusted import files
from launcher.untrusted.files import RefusedFile, opened
from launcher.user_errors import users_frame

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BROKEN = (errno.EROFS, errno.EIO, errno.ESTALE)
BLOCK = 4096  # the fewest bytes that a file or a folder takes on disk
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS)


class Unwritten(OSError, RunError):
    """Raised for a file of ours that cannot be written.

    Its text contains everything that the user needs; no traceback is shown.
    """

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def named_errors(path: Path, needed: int, present: int = 0) -> Iterator[None]:
    """Turns an ``OSError`` of the block into ``Unwritten`` for ``path``.

    If the disk is full, the message has the bytes ``needed`` and the bytes that are free. ``present`` are the
    bytes that a file already has if the block appends to it; they count towards the limit of a file's size.
    """
    try:
        yield
    except (Unwritten, RefusedFile, watched_folder.FolderMoved):
        raise
    except OSError as error:
        raise _unwritten(error, path, needed, present) from error


def unwritten(error: BaseException) -> Unwritten | RefusedFile | None:
    """Returns ``error`` as ``Unwritten`` if it is a disk error raised by our code or torch, else ``None``.

    A ``RefusedFile`` is returned as it is: its text, too, contains everything that the user needs.
    """
    if isinstance(error, Unwritten | RefusedFile):
        return error
    if not isinstance(error, OSError) or error.errno not in (*FULL, *BROKEN):
        return None
    if users_frame(error) is not None:
        return None
    if error.filename is None:
        return Unwritten(error.errno, os.strerror(error.errno), "a file")
    return _unwritten(error, Path(error.filename), BLOCK)


def _unwritten(error: OSError, path: Path, needed: int, present: int = 0) -> Unwritten:
    code = error.errno or errno.EIO
    why = _reason(code, path, needed, present) if code in FULL else os.strerror(code)
    return Unwritten(code, why, os.fspath(path))


def _reason(code: int, path: Path, needed: int, present: int) -> str:
    room = f"{free(path)} are free"
    if code == errno.EFBIG:
        needed += present
        room = f"{resource.getrlimit(resource.RLIMIT_FSIZE)[0]} are allowed (ulimit -f)"
    return f"{os.strerror(code)}: the file needs {needed} bytes, {room}"


def reserve(fd: int, size: int) -> None:
    """Extends an empty file to ``size`` bytes, and allocates them if the file system can.

    A full disk is then noticed before the first byte is written, and ext4 takes half the time to write
    allocated blocks.
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


COPIED = 1 << 30  # the most bytes of a file that is copied into a model folder, such as a tokenizer
_AT_FDCWD, _EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def write_text(path: Path, text: str) -> None:
    """Replaces a file and syncs it to disk; a reader sees either the old text or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file as ``write_text`` does."""
    with pinned(path) as there:
        there_new = there.with_name(f".{path.name}.{os.getpid()}")
        with _renamed(there_new, there):
            there_new.unlink(missing_ok=True)  # left by a killed process with the same id, or a link
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with named_errors(path, len(data)), open(os.open(there_new, flags, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())


@contextmanager
def _renamed(new: Path, path: Path) -> Iterator[None]:
    """Renames ``new`` to ``path`` when the block ends, and syncs the folder.

    Deletes ``new`` if the block raises.
    """
    try:
        yield
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a hidden path next to ``path``; the file written there replaces ``path`` when the block ends.

    The block opens the hidden path with ``watched_folder.open_file``. If it raises, the hidden file is
    deleted. One that a killed process left there is deleted first.
    """
    new = hidden(path)
    clear(new)
    with pinned(path) as there, _renamed(there.with_name(new.name), there):
        yield new
        watched_folder.check(path)


@contextmanager
def replaced_by_library(path: Path) -> Iterator[Path]:
    """Yields a path as ``replaced`` does, for a library that opens files by path.

    The library follows a link that somebody creates with the hidden name after the block has begun.
    """
    with replaced(path) as new, pinned(new) as there:
        yield there


def hidden(path: Path) -> Path:
    """Returns the hidden path where a file or folder is written before it is renamed to ``path``.

    It is hidden because a user's own ``NAME.partial`` may exist next to ``path``. It keeps the suffix, from
    which writers choose a format.
    """
    return path.with_name(f".{path.stem}.partial{path.suffix}")


def copy(src: Path, dst: Path) -> None:
    """Copies a file and syncs the copy to disk.

    Raises ``OSError`` if ``src`` is not a regular file or is larger than ``COPIED``.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with (
        opened(src, COPIED) as old,
        named_errors(dst, src.stat().st_size),
        open(watched_folder.open_file(dst, flags), "wb") as new,
    ):
        shutil.copyfileobj(old, new)
        new.flush()
        os.fsync(new.fileno())


def sync(folder: Path) -> None:
    """Syncs the entries of ``folder`` (the names of its files) to disk."""
    fd = watched_folder.open_file(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(new: Path, final: Path, trash: Path | None = None) -> None:
    """Gives the folder ``new`` its final name, and replaces a folder that has this name.

    This is one atomic step if the kernel and the file system can swap two names. If not, a kill between two
    renames leaves the old folder, complete, as ``trash`` (``NAME.trash`` by default).
    """
    trash = trash or _trash(final)
    with pinned(new) as there_new, pinned(final) as there, pinned(trash) as there_trash:
        swapped = os.path.lexists(there) and _swapped(there_new, there)
        if not swapped:
            if os.path.lexists(there):
                clear(trash)
                there.rename(there_trash)
            there_new.rename(there)
        sync(there.parent)
    clear(trash)
    if swapped:
        clear(new)  # after the swap this is the old folder


def rename(old: Path, new: Path) -> None:
    """Renames a file or a folder."""
    with pinned(old) as there_old, pinned(new) as there_new:
        there_old.rename(there_new)


def remove(folder: Path) -> None:
    """Renames a folder to ``NAME.trash`` before deleting it: a crash leaves no part under the old name."""
    clear(_trash(folder))
    rename(folder, _trash(folder))
    clear(_trash(folder))


def _trash(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.trash")


def clear(folder: Path) -> None:
    """Deletes a folder or a file; if it is a link, deletes only the link."""
    watched_folder.check(folder)
    if not os.path.lexists(folder):
        return
    with pinned(folder) as there:
        if there.is_symlink() or there.is_file():
            there.unlink()  # the folder that a link leads to is the user's
        elif there.exists():
            shutil.rmtree(there)


def discard(folder: Path) -> None:
    """Deletes a folder that was not completed, and ignores errors.

    It deletes nothing below a run folder that was moved, and nothing through a link.
    """
    with suppress(OSError), pinned(folder) as there:
        shutil.rmtree(there, ignore_errors=True)


def _swapped(a: Path, b: Path) -> bool:
    swap = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc 2.28; some file systems cannot
    return swap is not None and swap(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0


LONGEST_FILE = 1 << 28  # bytes; the manifest of 10000 ranks with 400 tensors each fits


def read_bytes(path: Path, longest: int = LONGEST_FILE) -> bytes:
    """Returns the content of a file.

    Raises ``OSError``; for a file that is not regular or too long this is ``RefusedFile``, also a
    ``ValueError``.
    """
    return files.read_bytes(path, longest)


def parsed(path: Path, data: bytes, prefix: str = "") -> Any:
    """Parses the JSON ``data`` that was read from ``path``.

    Raises ``ValueError`` if it is not JSON or repeats a key; the message has ``prefix`` after the path.
    """
    try:
        return files.parsed(data, unique=True)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {prefix}not JSON") from error
    except ValueError as error:
        raise ValueError(f"{path}: {prefix}{error}") from error


AT_ONCE = 64  # the most waiting calls; each may keep a file open that is not synced yet
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h


class WriteBehind:
    """Runs functions in one thread, in the order of ``do``. The block ends once all of them have returned."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._reported: deque[Future[object]] = deque()
        self._lock = Lock()

    def do(self, act: Callable[[], object]) -> None:
        """Submits ``act``; blocks only if many calls wait. Raises the error of an earlier ``act``."""
        with self._lock:
            self._reported.append(self._thread.submit(act))
            first = self._reported.popleft() if len(self._reported) > AT_ONCE else None
        if first is not None:
            first.result()

    def wait(self) -> None:
        """Waits until every ``act`` has returned. Raises the error of the first one that failed."""
        while self._reported:
            self._reported.popleft().result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._thread.shutdown()


def run_at_once(act: Callable[[], object]) -> None:
    """Calls ``act`` at once; it replaces ``WriteBehind.do`` where no thread is used."""
    act()


def start(fd: int, at: int, nbytes: int) -> None:
    """Tells the kernel, if it can, to start writing these bytes to disk, so that a later sync waits less."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_int64(at), ctypes.c_int64(nbytes), _WRITE)
