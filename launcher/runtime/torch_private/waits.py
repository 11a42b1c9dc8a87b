"""How long this process has waited for other ranks: seconds in ``Work.wait``, where collectives block.

With gloo every collective and every message of a step ends there. NCCL's return at once: the device waits.
"""

from __future__ import annotations

import time
from functools import wraps
from typing import Any

import torch.distributed as dist

_waited = [0.0]


def seconds() -> float:
    """Counted from the first call on."""
    wait = dist.Work.wait
    if not hasattr(wait, "__wrapped__"):
        dist.Work.wait = _timed(wait)  # type: ignore[method-assign]
    return _waited[0]


def _timed(wait: Any) -> Any:
    @wraps(wait)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return wait(*args, **kwargs)
        finally:
            _waited[0] += time.perf_counter() - began

    return timed
