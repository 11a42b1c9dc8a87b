"""Yields the bytes of a box, in order, through one buffer of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.checkpoint.layout.shards import slabs
from launcher.checkpoint.tensorfile.safetensors import words
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec

BUFFER = 1 << 20
"""The buffer's size in bytes: it stays in the processor's cache while it is filled, hashed and written."""

Fill = Callable[[Box, npt.NDArray[Any]], None]
"""Copies the elements of a box (global indices) into an array of the form that ``words`` returns."""


def stream_box(box: Box, dtype: str, fill: Fill) -> Iterator[memoryview]:
    """Yields the bytes of ``box``, in order; ``fill`` reads them.

    All chunks share one buffer, so a caller must use a chunk before it takes the next one.
    """
    buffer = np.empty(min(BUFFER, TensorSpec(box.shape, dtype).nbytes), np.uint8)
    for slab in slabs(box, ITEMSIZE[dtype], BUFFER):
        spec = TensorSpec(slab.shape, dtype)
        fill(slab, words(buffer, spec))
        yield buffer[: spec.nbytes].data


def box_index(box: Box) -> tuple[slice | EllipsisType, ...]:
    """Returns the index of ``box``. It ends with ``...``, so that a 0-d tensor gives an array too."""
    return *(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True)), ...
