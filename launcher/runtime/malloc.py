"""Lets malloc keep freed memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")
"""Variables with which users configure this themselves."""


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)


_MOST = (1 << 31) - 1


_LARGE = 1 << 30


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Keeps freed memory in this process for later use; returns whether that could be set.

    By default glibc returns memory to the kernel whenever the top of the heap happens to be free. The tensors
    of the next operation then need new pages, which takes longer than elementwise work. Whether that happens
    depends on the addresses of tensors: ranks with equal work would take different times, and wait.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in MALLOC_VARIABLES):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _MOST)) and bool(mallopt(_MMAP_THRESHOLD, _LARGE))
