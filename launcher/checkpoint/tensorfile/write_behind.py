"""Files put on the disk by a thread, while others are written."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from types import TracebackType

AT_ONCE = 64  # files that are open and not on the disk yet
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h


class WriteBehind:
    """Does what it is told in that order. The block ends when everything is done."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._told: deque[Future[object]] = deque()
        self._lock = Lock()

    def do(self, act: Callable[[], object]) -> None:
        """Returns at once, unless much is waiting. Raises what an earlier ``act`` has raised."""
        with self._lock:
            self._told.append(self._thread.submit(act))
            first = self._told.popleft() if len(self._told) > AT_ONCE else None
        if first is not None:
            first.result()

    def wait(self) -> None:
        """Until everything is done. Raises what an ``act`` has raised."""
        while self._told:
            self._told.popleft().result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._thread.shutdown()


def now(act: Callable[[], object]) -> None:
    """In the place of ``WriteBehind.do`` where nobody else is there to do it."""
    act()


def start(fd: int, at: int, nbytes: int) -> None:
    """Have the kernel begin to write this stretch to the disk, where it can: a later sync waits less."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_int64(at), ctypes.c_int64(nbytes), _WRITE)
