"""Runs torch's meta kernels without the import of torch._dynamo, which takes half a second and 30 MB.

Since torch 2.13, meta kernels that are written in Python are marked as not to be traced by dynamo, and the
first call of each imports dynamo even if nothing is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType

from torch._compile import _disable_dynamo
from torch._decomp import global_decomposition_table

UNTRACED = "__dynamo_disable"
"""The attribute in which ``torch._compile`` keeps the function that dynamo does not trace."""


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Marks the kernels as untraced for the block, unless dynamo has been imported already.

    Even if the block compiles, it traces no kernel: dynamo is not active while a meta kernel runs.
    """
    marked = [] if "torch._dynamo" in sys.modules else [f for f in _disabled() if not hasattr(f, UNTRACED)]
    for function in marked:
        setattr(function, UNTRACED, function)
    try:
        yield
    finally:
        for function in marked:
            if getattr(function, UNTRACED, None) is function:
                delattr(function, UNTRACED)


def _disabled() -> list[FunctionType]:
    """Returns the functions that wrappers of ``torch._disable_dynamo`` call, in all kernels in Python."""
    wrapper = _disable_dynamo(_disabled).__code__
    waiting = [kernel for table in global_decomposition_table.values() for kernel in table.values()]
    seen: set[int] = set()
    disabled = []
    while waiting:
        kernel = waiting.pop()
        if not isinstance(kernel, FunctionType) or id(kernel) in seen:
            continue
        seen.add(id(kernel))
        inner = [cell.cell_contents for cell in kernel.__closure__ or () if _filled(cell)]
        if kernel.__code__ is wrapper:
            disabled += [function for function in inner if isinstance(function, FunctionType)]
        waiting += inner
    return disabled


def _filled(cell: object) -> bool:
    """Returns true if a variable of an outer function has a value yet."""
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:
        return False
    return True
