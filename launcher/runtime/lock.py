"""The lock of a run folder: one launcher at a time works there."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from launcher.checkpoint.tensorfile.disk_space import told
from launcher.errors import Problem, RequestError
from launcher.untrusted.files import RefusedFile
from launcher.untrusted.links import open_below

NAME = ".lock"
PATIENCE_S = 5.0  # for ranks that their launcher's death is just ending
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_log = logging.getLogger(__name__)


held: set[int] = set()
"""Descriptors of locks that this process has."""


@contextmanager
def holding(fd: int) -> Iterator[None]:
    """Children that start in the block hold ``fd`` too: a lock lasts until the last of them has ended."""
    held.add(fd)
    try:
        yield
    finally:
        held.discard(fd)


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Holds ``run`` for this process and the ranks that work for it.

    Raises ``RequestError`` while another launcher has it. The kernel lets go when the last of them has
    ended, however that came. A file system without locks costs a warning.
    """
    path = run / NAME
    mine = f"{os.getpid()} {socket.gethostname()}\n".encode()
    with told(path, len(mine)):
        fd = _opened(run)
    with open(fd, encoding="utf-8") as file:
        if _taken(file):
            _wait_for_the_dead(file, run)
        with told(path, len(mine)):
            os.pwrite(fd, mine, 0)
            os.ftruncate(fd, len(mine))
        with holding(fd):
            yield


def at_work(run: Path, patience_s: float) -> str | None:
    """In words, which launcher still holds ``run`` after ``patience_s``; ``None`` when none does."""
    if not (run / NAME).is_file():
        return None
    end = time.monotonic() + patience_s
    with open(open_below(run, NAME, os.O_RDWR), "r+", encoding="utf-8") as file:
        while _taken(file):
            if time.monotonic() > end:
                return _who(file)
            time.sleep(0.05)
    return None


def _opened(run: Path) -> int:
    try:
        return open_below(run, NAME, os.O_RDWR | os.O_CREAT)
    except RefusedFile as error:
        raise RequestError((Problem("run_dir", str(error)),)) from error


def _who(file: TextIO) -> str:
    file.seek(0)
    pid, _, host = file.read().strip().partition(" ")
    return f"another launcher is using it (process {pid or '?'} on {host or '?'})"


def _taken(file: TextIO) -> bool:
    """Whether somebody else has it; else it is ours."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("%s: this file system has no locks; make sure that no other launcher uses it", file.name)
    return False


def _wait_for_the_dead(file: TextIO, run: Path) -> None:
    """A holder that is gone has left ranks behind, which are ending; one that lives is to be left alone."""
    end = time.monotonic() + PATIENCE_S
    while True:
        file.seek(0)
        pid, _, host = file.read().strip().partition(" ")
        if _alive(pid, host) or time.monotonic() > end:
            raise RequestError((Problem("run_dir", f"{run}: {_who(file)}"),))
        time.sleep(0.02)
        if not _taken(file):
            return


def _alive(pid: str, host: str) -> bool:
    """``False`` only for a process of this machine that has ended; an empty file is about to be written."""
    if not pid:
        return False
    return host != socket.gethostname() or Path("/proc", pid).exists()
