"""The number of bytes per element of each dtype."""

from __future__ import annotations

ITEMSIZE = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
    "int16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2,
    "uint32": 4, "uint64": 8,
}  # fmt: skip
"""Bytes per element of the dtypes that checkpoints store."""

WIDTH = ITEMSIZE | {
    "complex128": 16, "complex32": 4, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "quint8": 1, "qint8": 1, "qint32": 4,
}  # fmt: skip
"""Bytes per element, also of dtypes that a forward may compute with but no checkpoint can hold."""
