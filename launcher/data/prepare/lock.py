"""Locks the folder in which ``prepare`` works, so that another ``prepare`` waits."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"
POLL_S = 0.1


@contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Creates and locks ``folder``. Waits for a process that works in the folder and may then rename it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (folder / LOCK).open("w")
        except FileNotFoundError:  # another process has just finished and renamed it
            continue
        with file:
            _wait(file.fileno(), folder, say)
            if _is_at(file.fileno(), folder / LOCK):
                yield
                return


def _wait(fd: int, folder: Path, say: Callable[[str], None]) -> None:
    announced = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not announced:
                say(f"another process works in {folder}: waiting for it")
            announced = True
            time.sleep(POLL_S)


def _is_at(fd: int, path: Path) -> bool:
    mine = os.fstat(fd)
    with suppress(FileNotFoundError):
        there = os.stat(path)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
    return False
