"""Runs calls that block in native code, where Python's signal handlers would have to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LOOK_S = 0.05


def nothing() -> None:
    """The default ``look``: checks nothing."""


def interruptible(
    call: Callable[[], T], look: Callable[[], None] = nothing, within_s: float | None = None
) -> T:
    """Runs ``call`` in another thread and returns its result; this thread waits in Python.

    So the main thread runs its signal handlers at once, and calls ``look`` every ``LOOK_S`` seconds.
    Exceptions of ``look`` or a handler are raised here; ``call`` then stays in its thread, which ends with
    the process. Raises ``TimeoutError`` after ``within_s``, and what ``call`` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="waiting", daemon=True).start()
    end = None if within_s is None else time.monotonic() + within_s
    while not done.wait(LOOK_S):
        look()
        if end is not None and time.monotonic() > end:
            raise TimeoutError(f"no answer within {within_s:g} s")
    if errors:
        raise errors[0]
    return results[0]
