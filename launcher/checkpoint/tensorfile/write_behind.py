"""Syncs files to disk in a thread while others are written."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from types import TracebackType

AT_ONCE = 64  # the most calls that wait; each may hold a file that is open and not synced yet
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h


class WriteBehind:
    """Runs functions in one thread, in the order of ``do``. The block ends when all of them have returned."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._told: deque[Future[object]] = deque()
        self._lock = Lock()

    def do(self, act: Callable[[], object]) -> None:
        """Submits ``act``; blocks only if many are waiting. Raises what an earlier ``act`` has raised."""
        with self._lock:
            self._told.append(self._thread.submit(act))
            first = self._told.popleft() if len(self._told) > AT_ONCE else None
        if first is not None:
            first.result()

    def wait(self) -> None:
        """Waits until every ``act`` has returned. Raises what an ``act`` has raised."""
        while self._told:
            self._told.popleft().result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._thread.shutdown()


def now(act: Callable[[], object]) -> None:
    """Calls ``act`` at once: the replacement for ``WriteBehind.do`` if there is no thread."""
    act()


def start(fd: int, at: int, nbytes: int) -> None:
    """Tells the kernel, if it can, to start writing these bytes to disk, so that a later sync waits less."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_int64(at), ctypes.c_int64(nbytes), _WRITE)
