"""One tensor as raw bytes: little-endian, C-contiguous, of a dtype that numpy need not know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.plan.values.facts import ITEMSIZE, TensorSpec

Bytes = bytes | bytearray | memoryview | npt.NDArray[Any]

CODES = {
    "float64": "F64", "int64": "I64", "complex64": "C64", "float32": "F32", "int32": "I32", "float16": "F16",
    "bfloat16": "BF16", "int16": "I16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8",
    "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Blob:
    """One tensor. ``data`` is a flat view of bytes. ``Blob.of`` makes one from any contiguous buffer."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], data: Bytes) -> Blob:
        """Wraps a buffer without a copy.

        Raises ``ValueError`` for an unknown dtype, a wrong length or a strided buffer.

        >>> Blob.of("bfloat16", (2,), b"abcd").data.nbytes
        4
        """
        if dtype not in ITEMSIZE:
            raise ValueError(f"dtype {dtype} is not known; known are {', '.join(ITEMSIZE)}")
        spec = TensorSpec(shape, dtype)
        try:
            flat = np.frombuffer(data, np.uint8).data
        except ValueError as error:
            raise ValueError(
                f"the data of a {described(spec)} tensor is not contiguous: copy it first"
            ) from error
        if flat.nbytes != spec.nbytes:
            raise ValueError(f"a {described(spec)} tensor has {spec.nbytes} bytes, not {flat.nbytes}")
        return cls(dtype, shape, flat)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, self.dtype)


def described(spec: TensorSpec) -> str:
    """Returns a spec as messages show it: ``float32[4, 8]``."""
    return f"{spec.dtype}{list(spec.shape)}"


def words(data: Bytes | Any, spec: TensorSpec, offset: int = 0) -> npt.NDArray[Any]:
    """Returns a view of the tensor at byte ``offset`` of ``data``; its elements are unsigned integers.

    These have the size of the dtype, and serve for copies, not for arithmetic.
    """
    flat = np.frombuffer(data, np.uint8, spec.nbytes, offset)
    return flat.view(f"u{ITEMSIZE[spec.dtype]}").reshape(spec.shape)
