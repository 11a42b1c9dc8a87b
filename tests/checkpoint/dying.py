"""Processes that are killed just before, or during, one chosen change to the disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from threading import Lock
from typing import Any

EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "ctypes.dlsym")  # the last: renameat2


class Counter:
    """Counts changes and kills the process at number ``last``. A write has two moments: its start and its middle."""

    def __init__(self, last: int) -> None:
        self.last, self.seen = last, 0
        self._lock = Lock()  # files are synced by a thread of their own

    def install(self) -> None:
        sys.addaudithook(self._audit)
        write = os.pwrite

        def torn(fd: int, data: memoryview, at: int) -> int:
            self._moment()
            if self.seen + 1 == self.last:
                write(fd, data[: len(data) // 2], at)
            self._moment()
            return write(fd, data, at)

        def synced(fd: int) -> None:
            self._moment()  # nothing more: what a process has written outlives it, even if it is not on the disk yet

        os.pwrite, os.fsync = torn, synced  # type: ignore[assignment]

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            self._moment()

    def _moment(self) -> None:
        with self._lock:
            self.seen += 1
            if self.seen == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def moments(act: Callable[[], Any]) -> int:
    """The number of changes to the disk that ``act`` makes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(act, Counter(0), writing)
    os.close(writing)
    with os.fdopen(reading) as told:
        count = told.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return int(count)


def killed(act: Callable[[], Any], moment: int) -> None:
    """Run ``act`` in a process that SIGKILL ends at change number ``moment`` to the disk, counted from 1."""
    pid = os.fork()
    if pid == 0:
        _run(act, Counter(moment), None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def _run(act: Callable[[], Any], counter: Counter, told: int | None) -> None:
    """Run ``act`` in a forked child, which never returns into the test."""
    code = 1
    try:
        counter.install()
        act()
        seen = counter.seen
        counter.last = -1
        if told is not None:
            os.write(told, str(seen).encode())
        code = 0
    finally:
        os._exit(code)
