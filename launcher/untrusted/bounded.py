"""Limits on the time and memory that processing untrusted text may take."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class TooLong(BaseException):
    """The block ran longer than its time limit, or took more memory.

    It is no ``Exception``: jinja2 ignores every ``Exception`` while it evaluates constants of a template.
    """


AGAIN_S = 0.05
"""Seconds between alarms: Python drops an exception raised in a callback of its garbage collector."""


@contextmanager
def bounded(seconds: float, nbytes: int) -> Iterator[None]:
    """Limits the block to ``seconds`` and to ``nbytes`` of memory beyond what the process has now.

    Raises ``TooLong`` or ``MemoryError``. Time is limited in the main thread only, and only between Python
    operations: a single operation that takes too long must be refused by other means.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space() + nbytes
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        with _alarm(lambda: "more time", seconds):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def watched(seconds: float, nbytes: int) -> Iterator[None]:
    """Limits the block to ``seconds`` of CPU time, and to ``nbytes`` of resident memory beyond what there is.

    Raises ``TooLong``, with the limit as its text. In contrast to ``bounded``, the block may import libraries
    and start threads, which take much address space. Both limits hold in the main thread only, and only
    between Python operations.
    """
    began, most = time.thread_time(), _resident() + nbytes

    def beyond() -> str:
        if time.thread_time() - began > seconds:
            return f"more than {seconds:g} s"
        return f"more than {nbytes >> 20} MiB" if _resident() > most else ""

    with _alarm(beyond, AGAIN_S):
        yield


@contextmanager
def _alarm(beyond: Callable[[], str], first: float) -> Iterator[None]:
    """Calls ``beyond`` from ``first`` seconds on; raises ``TooLong`` in the block once it names a limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over = False

    def late(_: int, __: FrameType | None) -> None:
        if not over and (limit := beyond()):
            raise TooLong(limit)

    before = signal.signal(signal.SIGALRM, late)
    outer = signal.setitimer(signal.ITIMER_REAL, first, AGAIN_S)
    try:
        try:
            yield
        finally:
            over = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *outer)  # an enclosing block goes on with its own alarm


def _address_space() -> int:
    return _memory(0)


def _resident() -> int:
    return _memory(1)


def _memory(field: int) -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[field])
    return pages * resource.getpagesize()
