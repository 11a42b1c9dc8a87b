"""Tensors as another floating dtype, where the two programs keep their weights in different ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.checkpoint.blob import Blob, described
from launcher.checkpoint.files import blob_at, mapped, sliced, write_stream
from launcher.checkpoint.header import read_header
from launcher.plan.facts import TensorSpec

WIDTHS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Binary digits that a number of each dtype keeps. Others are no plain numbers: fp8 comes with scales of its own."""
INTO = ("float32", "float64")


def exact(src: str, dst: str) -> bool:
    """Whether every number of ``src`` is one of ``dst``."""
    return WIDTHS[src] <= WIDTHS[dst]


def differing(tensors: Mapping[str, Blob], wanted: Mapping[str, TensorSpec]) -> dict[str, str]:
    """The new dtype of each tensor that has another one than ``wanted`` and can be cast; the rest is left alone."""
    return {
        name: wanted[name].dtype
        for name, blob in tensors.items()
        if name in wanted and wanted[name].dtype != blob.dtype and castable(blob.dtype, wanted[name].dtype)
    }


def castable(src: str, dst: str) -> bool:
    """Whether ``cast`` can make the one of the other."""
    return src in WIDTHS and dst in INTO


def cast(tensors: Mapping[str, Blob], into: Mapping[str, str], file: Path) -> dict[str, Blob]:
    """``tensors``, those named in ``into`` with that dtype: they are written to ``file`` and read from there.

    To the nearest number, ties to even. Raises ``ValueError`` for a number that is too large for its new dtype.
    """
    specs = {name: TensorSpec(tensors[name].shape, dtype) for name, dtype in into.items()}
    write_stream(file, specs, lambda name: _chunks(name, tensors[name], into[name]), {})
    data, header = mapped(file), read_header(file)
    return {name: blob_at(data, header, name) if name in into else blob for name, blob in tensors.items()}


def _chunks(name: str, blob: Blob, dtype: str) -> Iterator[memoryview]:
    for piece in sliced(blob.data):  # whole numbers: they are of 2, 4 or 8 bytes
        old = _numbers(piece, blob.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large is looked for; NaN stays NaN
            new = old.astype(dtype)
        if not exact(blob.dtype, dtype) and (np.isinf(new) & ~np.isinf(old)).any():
            raise ValueError(f"{name}: {described(blob.spec)} has numbers that are too large for {dtype}")
        yield new.view(np.uint8).data


def _numbers(data: memoryview, dtype: str) -> npt.NDArray[Any]:
    """bfloat16, which numpy does not know, is the upper half of a float32."""
    if dtype != "bfloat16":
        return np.frombuffer(data, dtype)
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
