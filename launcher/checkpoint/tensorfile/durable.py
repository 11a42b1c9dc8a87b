"""Atomic changes to files and folders: a crash leaves each either undone or done."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from launcher.checkpoint.tensorfile.disk_space import told
from launcher.untrusted.files import opened

COPIED = 1 << 30  # the most bytes of a file that is copied beside a model, such as a tokenizer
_AT_FDCWD, _EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def write_text(path: Path, text: str) -> None:
    """Replaces a file and syncs it to disk; a reader sees either the old text or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file as ``write_text`` does."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.unlink(missing_ok=True)  # left by a killed process with the same id, or a link
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with told(path, len(data)), open(os.open(new, flags, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def copy(src: Path, dst: Path) -> None:
    """Copies a file and syncs the copy to disk.

    Raises ``OSError`` if ``src`` is not a regular file or is larger than ``COPIED``.
    """
    with opened(src, COPIED) as old, told(dst, src.stat().st_size), dst.open("wb") as new:
        shutil.copyfileobj(old, new)
        new.flush()
        os.fsync(new.fileno())


def sync(folder: Path) -> None:
    """Syncs the entries of ``folder`` (the names of its files) to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(new: Path, final: Path) -> None:
    """Gives the folder ``new`` its final name, replacing what has that name.

    This is one atomic step if the kernel and the file system can swap two names. If not, a kill between two
    renames leaves the old folder, complete, as ``.trash``.
    """
    trash = _trash(final)
    swapped = os.path.lexists(final) and _swapped(new, final)
    if not swapped:
        if os.path.lexists(final):
            clear(trash)
            final.rename(trash)
        new.rename(final)
    sync(final.parent)
    clear(trash)
    if swapped:
        clear(new)  # after the swap this is the old folder


def remove(folder: Path) -> None:
    """Deletes a folder; what a crash leaves of it is named ``.trash``, never like a complete folder."""
    clear(_trash(folder))
    clear(folder.rename(_trash(folder)))


def _trash(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.trash")


def clear(folder: Path) -> None:
    """Deletes a folder; if it is a link, deletes only the link."""
    if folder.is_symlink():
        folder.unlink()  # the folder that it leads to is the user's
    elif folder.exists():
        shutil.rmtree(folder)


def _swapped(a: Path, b: Path) -> bool:
    swap = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc 2.28; not every file system can
    return swap is not None and swap(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0
