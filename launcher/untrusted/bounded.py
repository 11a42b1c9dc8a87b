"""Limits on the time and memory that processing untrusted text may take."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class TooLong(BaseException):
    """The block ran longer than its time limit.

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
        with _alarm(seconds):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over = False

    def late(_: int, __: FrameType | None) -> None:
        if not over:
            raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            over = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()
