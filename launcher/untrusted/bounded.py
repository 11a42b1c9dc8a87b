"""Limits on the time and memory that processing untrusted text may take."""

from __future__ import annotations

import os
import resource
import signal
import sys
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
    with limited_memory(nbytes), _alarm(seconds):
        yield


@contextmanager
def limited_memory(nbytes: int) -> Iterator[None]:
    """Limits the block to ``nbytes`` of memory beyond what the process has now. Raises ``MemoryError``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(nbytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def limit_memory(nbytes: int) -> None:
    """Limits this process to ``nbytes`` of memory beyond what it has now; a lower limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space() + nbytes
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def limit_processor_time(seconds: int) -> None:
    """Lets ``SIGXCPU`` end this process after ``seconds`` more of processor time.

    Unlike elapsed time, this does not depend on what else the machine does.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def silence_native_code() -> None:
    """Drops what native code writes to standard error, such as the message of a panic and its backtrace.

    Python still writes there. For child processes only: it is never undone.
    """
    sys.stderr = os.fdopen(os.dup(_STDERR), "w", buffering=1, errors="backslashreplace")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, _STDERR)
    os.close(null)


_STDERR = 2


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
