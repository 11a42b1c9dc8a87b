"""How long a thread has waited for other ranks: seconds in ``Work.wait``, where collectives block.

With gloo every collective and every message of a step ends there. NCCL's return at once: the device waits.
"""

from __future__ import annotations

import threading
import time
from functools import wraps
from typing import Any

import torch.distributed as dist


class _Waited(threading.local):
    """Of each thread its own: the one that writes a checkpoint waits while training goes on."""

    seconds = 0.0


_waited = _Waited()


def seconds() -> float:
    """Of the thread that asks, counted from the first call of any on."""
    wait = dist.Work.wait
    if not hasattr(wait, "__wrapped__"):
        dist.Work.wait = _timed(wait)  # type: ignore[method-assign]
    return _waited.seconds


def _timed(wait: Any) -> Any:
    @wraps(wait)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return wait(*args, **kwargs)
        finally:
            _waited.seconds += time.perf_counter() - began

    return timed
