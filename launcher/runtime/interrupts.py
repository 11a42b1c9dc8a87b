"""Turns stop signals into an exception, in the process that the user started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from launcher.runtime.faults import Interrupted
from launcher.runtime.preemption import STOPS

_late: list[int] = []


@contextmanager
def stoppable() -> Iterator[None]:
    """The first stop signal in the block raises ``Interrupted``, in the main thread only.

    Ignored signals stay ignored (``nohup``, a background job), and ``deafen`` within the block stays in
    effect.
    """
    _late.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = [s for s in STOPS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = {s: signal.signal(s, _stop) for s in mine}
    try:
        yield
    finally:
        for signum, handler in before.items():
            if signal.getsignal(signum) is not _unheard:
                signal.signal(signum, handler)


def deafen() -> None:
    """Stop signals have no effect from now on; an earlier one may still raise ``Interrupted``, once.

    A signal mask would not suffice: it only covers the main thread, and the system would deliver the signal
    to one of torch's threads.
    """
    if threading.current_thread() is threading.main_thread():
        for signum in STOPS:
            signal.signal(signum, _unheard)


def _unheard(signum: int, _: FrameType | None) -> None:
    pass


def later(signum: int) -> None:
    """Stores a signal that came when there was nothing left to stop; the next ``check`` raises it."""
    _late.append(signum)


def check() -> None:
    """Raises ``Interrupted`` for a stored signal, before more work begins."""
    if _late:
        raise Interrupted(_late.pop())


def _stop(signum: int, _: FrameType | None) -> None:
    for more in STOPS:
        signal.signal(more, signal.SIG_IGN)  # a launcher repeats the terminal's signals; we are stopping
    raise Interrupted(signum)
