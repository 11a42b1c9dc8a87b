"""Locks a run folder, so that only one launcher works there at a time."""

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
PATIENCE_S = 5.0  # for ranks that are ending because their launcher died
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_log = logging.getLogger(__name__)


held: set[int] = set()
"""Descriptors of the locks that this process holds."""


@contextmanager
def holding(fd: int) -> Iterator[None]:
    """Children that start in the block inherit ``fd``: the lock lasts until the last of them has ended."""
    held.add(fd)
    try:
        yield
    finally:
        held.discard(fd)


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Locks ``run`` for this process and its ranks.

    Raises ``RequestError`` while another launcher holds the lock. The kernel releases it when the last of
    them has ended, in whatever way. A file system without locks causes a warning.
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
    """Describes the launcher that still holds ``run`` after ``patience_s``; ``None`` if none does."""
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
    """Tries to take the lock; returns whether another process holds it."""
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
    """Waits for ranks that a dead launcher left behind and that are ending.

    Raises ``RequestError`` if the launcher is alive.
    """
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
    """Whether the holder of the lock may be at work: on another machine, or in a live process here.

    An empty file is about to be written; it counts as held by no process.
    """
    if not pid:
        return False
    return host != socket.gethostname() or Path("/proc", pid).exists()
