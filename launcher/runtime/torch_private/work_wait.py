"""Measures how long this rank waits in ``Work.wait``.

With gloo every collective and every message of a step blocks in ``Work.wait``. NCCL's calls return at once:
the device waits instead.
"""

from __future__ import annotations

import threading
import time
from functools import wraps
from typing import Any

import torch.distributed as dist


class _Waited(threading.local):
    """One value per thread: a thread that writes a checkpoint waits while training continues."""

    seconds = 0.0


_waited = _Waited()


def seconds_waited() -> float:
    """Returns seconds that the calling thread has waited, counted from the first call of this function."""
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
