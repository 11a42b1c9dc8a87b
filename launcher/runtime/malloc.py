"""What the C library does with memory that a rank on CPU frees."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

TOLD = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")
"""Where users say themselves what it does."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_MOST = (1 << 31) - 1
_LARGE = 1 << 30


def keep(environ: Mapping[str, str] = os.environ) -> bool:
    """From here on freed memory stays with this process for what comes next; whether that could be said.

    By default glibc gives it back to the kernel wherever the top of the heap happens to be free. Each tensor
    of the next operation is then made of new pages, which takes longer than what is element by element. If
    it comes to that hangs on where tensors lie: ranks that do the same take unlike times, and wait.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in TOLD):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _MOST)) and bool(mallopt(_MMAP_THRESHOLD, _LARGE))
