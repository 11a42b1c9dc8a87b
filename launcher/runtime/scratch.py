"""A folder for temporary files that is deleted even when its owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.runtime.lock import holding

PREFIX = "launcher-"
OWNER = "owner"


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, deleted with the block; also deletes folders whose owners were killed.

    The file ``owner`` in it is locked. The kernel releases the lock with the last process that holds it, and
    other containers see it, where a process id means nothing.
    """
    home = Path(tempfile.gettempdir())
    sweep(home)
    folder, owner = _made(home)
    try:
        with holding(owner):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)


def sweep(home: Path) -> tuple[Path, ...]:
    """Deletes folders below ``home`` that no process owns; keeps those of other users and other programs."""
    gone = []
    for owner in home.glob(f"{PREFIX}*/{OWNER}"):
        try:
            if owner.stat().st_uid != os.geteuid():
                continue
            fd = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # its owner was first
            continue

        # the lock of a process that has ended can be taken
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)
            gone.append(owner.parent)
        except OSError:  # a process works there, or this file system has no locks
            continue
        finally:
            os.close(fd)
    return tuple(gone)


def _made(home: Path) -> tuple[Path, int]:
    """A new folder with a lock; repeats if another process swept the folder before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
        owner = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / OWNER).exists():
                return folder, owner
        except BlockingIOError:
            pass
        except OSError:  # no locks here: it cannot be swept either
            return folder, owner
        os.close(owner)
