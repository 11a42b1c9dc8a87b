"""Turns signals that request a stop into an exception or a flag."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from launcher.runtime.faults import Interrupted

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ONCE_S = 0.5
"""A signal that is repeated within this time counts once: the group's leader forwards it as well."""
LEAVE_S = 1.5  # seconds from the second signal until a process that waits in native code is ended


class StopFlag:
    """Records signals that ask this process to stop.

    ``signum``: the first signal, or 0; ``insisted``: another one came later.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.insisted = False
        self._since = 0.0

    def note(self, signum: int) -> None:
        now = time.monotonic()
        if not self.signum:
            self.signum = signum
            self._since = now
        elif signum != self.signum or now - self._since > ONCE_S:
            self.insisted = True

    def __call__(self) -> int:
        return self.signum


def polled(signums: tuple[signal.Signals, ...] = STOPS) -> StopFlag:
    """Makes ``signums`` only set the returned flag; an ignored signal (``nohup``) stays ignored.

    For a rank whose supervisor handles a repeated request to stop.
    """
    flag = StopFlag()
    for signum in signums:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda number, _: flag.note(number))
    return flag


@contextmanager
def heard(forced: bool = False) -> Iterator[StopFlag]:
    """Makes the first stop signal in the block set the flag, and a second one raise ``Interrupted``.

    ``forced``: a process that waits for a peer in native code, where nothing can be raised, is ended soon
    after. Only the main thread receives signals; ``deafen`` within the block stays in effect.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def hear(signum: int, _: FrameType | None) -> None:
        flag.note(signum)
        if flag.insisted:
            raise Interrupted(signum, insisted=True)

    mine = [s for s in STOPS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = {s: signal.signal(s, hear) for s in mine}
    try:
        if forced:
            _force(hear)
        yield flag
    finally:
        for signum, handler in before.items():
            if signal.getsignal(signum) is hear:
                signal.signal(signum, handler)
        if forced:
            signal.set_wakeup_fd(-1)


def _force(hear: Callable[[int, FrameType | None], None]) -> None:
    """Starts a thread that is woken by each signal. It ends nothing once ``hear`` has been replaced."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def work() -> None:
        flag = StopFlag()
        while not flag.insisted:
            for signum in os.read(read, 64):
                if signum in STOPS:
                    flag.note(signum)
        time.sleep(LEAVE_S)
        if signal.getsignal(flag.signum) is hear:
            os._exit(128 + flag.signum)

    threading.Thread(target=work, name="signals", daemon=True).start()


_late: list[int] = []


@contextmanager
def stoppable() -> Iterator[None]:
    """Makes the first stop signal in the block raise ``Interrupted``, in the main thread only.

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
    """Stops signals have no effect from now on; an earlier one may still raise ``Interrupted``, once.

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
