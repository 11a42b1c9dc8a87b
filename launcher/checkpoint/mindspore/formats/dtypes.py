"""MindSpore's names for dtypes."""

from __future__ import annotations

from math import prod

from launcher.plan.values.facts import TensorSpec

TEXT = "str"  # not a tensor dtype: a string that is saved among tensors, in UTF-32
DTYPES = {
    "Int8": "int8", "UInt8": "uint8", "Int16": "int16", "UInt16": "uint16", "Int32": "int32",
    "UInt32": "uint32", "Int64": "int64", "UInt64": "uint64", "Float16": "float16", "BFloat16": "bfloat16",
    "Float32": "float32", "Float64": "float64", "Bool": "bool", "Int4": "int4x2", TEXT: TEXT,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIZES = {
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int4x2": 1, TEXT: 4,
}  # fmt: skip
"""The bytes of an element; an element of ``int4x2`` has two numbers."""


def nbytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * SIZES[spec.dtype]
