"""Locks the folder in which ``prepare`` works, so that another ``prepare`` waits."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.errors import Problem, RequestError
from launcher.untrusted.files import LINK, RefusedFile, links, open_below

LOCK = ".lock"
POLL_S = 0.1


@contextmanager
def locked(folder: Path, say: Callable[[str], None], key: str) -> Iterator[None]:
    """Creates and locks ``folder``. Waits for a process that works in the folder and may then rename it.

    Raises ``RequestError`` if ``folder`` is a link, or has links in it: files there are replaced and deleted.
    ``key``: the setting that names the folder.
    """
    while True:
        _check_links(folder, key)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fd = open_below(folder.parent, Path(folder.name, LOCK), os.O_WRONLY | os.O_CREAT)
        except FileNotFoundError:  # another process has just finished and renamed it
            continue
        except RefusedFile as error:
            raise RequestError((Problem(key, str(error)),)) from error
        with open(fd, "w", encoding="utf-8"):
            _wait(fd, folder, say)
            if _is_at(fd, folder / LOCK):
                _check_links(folder, key)
                yield
                return


def _check_links(folder: Path, key: str) -> None:
    link = next(links(folder), None) if os.path.lexists(folder) else None
    if link is not None:
        raise RequestError((Problem(key, f"{link}: {LINK}"),))


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
