"""Turns signals that ask to stop into an exception, in the process that the user started."""

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
    """The first signal in the block raises ``Interrupted``. Only the main thread gets any.

    A signal that is ignored (``nohup``, a background job) stays so, and what ``deafen`` did within.
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
    """From now on no signal that asks to stop does anything; one from before may still raise ``Interrupted``.

    It does so once. A mask would not do: it is the main thread's, and the system hands the signal to one of
    torch's.
    """
    if threading.current_thread() is threading.main_thread():
        for signum in STOPS:
            signal.signal(signum, _unheard)


def _unheard(signum: int, _: FrameType | None) -> None:
    pass


def later(signum: int) -> None:
    """A signal that came when there was nothing to stop any more; the next ``check`` raises it."""
    _late.append(signum)


def check() -> None:
    """Raises ``Interrupted`` for a signal that was put off: there is more to do, and it is not begun."""
    if _late:
        raise Interrupted(_late.pop())


def _stop(signum: int, _: FrameType | None) -> None:
    for more in STOPS:
        signal.signal(
            more, signal.SIG_IGN
        )  # a launcher sends what the terminal has sent already; we are leaving
    raise Interrupted(signum)
