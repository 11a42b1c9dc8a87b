"""The bytes of a box, in order, through one buffer however large the box."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.checkpoint.layout.shards import slabs
from launcher.checkpoint.tensorfile.blob import words
from launcher.plan.values.facts import ITEMSIZE, TensorSpec
from launcher.plan.values.layout import Box

BUFFER = 1 << 20
"""Bytes; so few are still in the processor's cache when they are digested, and when they are written."""

Fill = Callable[[Box, npt.NDArray[Any]], None]
"""Puts the elements of a box, in global indices, into an array as ``words`` makes it."""


def gathered(box: Box, dtype: str, fill: Fill) -> Iterator[memoryview]:
    """All chunks share one buffer: use each before the next."""
    buffer = np.empty(min(BUFFER, TensorSpec(box.shape, dtype).nbytes), np.uint8)
    for slab in slabs(box, ITEMSIZE[dtype], BUFFER):
        spec = TensorSpec(slab.shape, dtype)
        fill(slab, words(buffer, spec))
        yield buffer[: spec.nbytes].data


def slices(box: Box) -> tuple[slice | EllipsisType, ...]:
    """Ends with ``...``, so that 0-d gives an array too."""
    return *(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True)), ...
