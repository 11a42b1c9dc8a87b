"""Limits on the time and memory that processing untrusted text may take."""

from __future__ import annotations

import os
import resource
import signal
import sys
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
"""Seconds between alarms until a limit is passed."""
RAISED_S = 0.5
"""Seconds from there to the next alarm, as Python drops an exception in a callback of its garbage collector.

Meanwhile it reports the dropped one, which reads source files and takes its time on a busy machine.
"""


@contextmanager
def bounded(seconds: float, nbytes: int) -> Iterator[None]:
    """Limits the block to ``seconds`` and to ``nbytes`` of memory beyond what the process has now.

    Raises ``TooLong`` or ``MemoryError``. Time is limited in the main thread only, and only between Python
    operations: a single operation that takes too long must be refused by other means.
    """
    with limited_memory(nbytes), _alarm(lambda: "more time", seconds):
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
def watched(seconds: float, nbytes: int) -> Iterator[None]:
    """Limits the block to ``seconds`` of CPU time, and to ``nbytes`` more of resident memory.

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
            signal.setitimer(signal.ITIMER_REAL, RAISED_S, RAISED_S)
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
        signal.setitimer(signal.ITIMER_REAL, *outer)  # the alarm of an enclosing block continues


def _address_space() -> int:
    return _memory(0)


def _resident() -> int:
    return _memory(1)


def _memory(field: int) -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[field])
    return pages * resource.getpagesize()
