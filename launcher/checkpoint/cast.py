"""Casts tensors to another float dtype while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.checkpoint.full_tensors import FullTensors
from launcher.checkpoint.tensorfile.safetensors import described
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec

WIDTHS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""The bits of precision of each dtype that can be cast.

Other dtypes cannot be cast by value alone: fp8 tensors come with separate scales.
"""
INTO = ("float32", "float64")


def exact(src: str, dst: str) -> bool:
    """Returns true if a cast from ``src`` to ``dst`` keeps every bit of precision."""
    return WIDTHS[src] <= WIDTHS[dst]


def differing(specs: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Returns the new dtype of each tensor whose dtype differs from ``target`` but can be cast to it."""
    return {
        name: target[name].dtype
        for name, spec in specs.items()
        if name in target and target[name].dtype != spec.dtype and castable(spec.dtype, target[name].dtype)
    }


def castable(src: str, dst: str) -> bool:
    """Returns true if tensors of dtype ``src`` may be cast to ``dst`` when they are imported."""
    return src in WIDTHS and dst in INTO


@dataclass(frozen=True)
class Cast:
    """The tensors of ``source``; each tensor in ``into`` is cast to the dtype that ``into`` maps it to.

    Values are rounded to nearest, ties to even. ``fill`` raises ``ValueError`` for a number that is too large
    for its new dtype.
    """

    source: FullTensors
    into: Mapping[str, str]

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {n: TensorSpec(s.shape, self.into.get(n, s.dtype)) for n, s in self.source.specs.items()}

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        if name not in self.into:
            self.source.fill(name, part, out)
            return

        # the source's values
        spec = self.source.specs[name]
        raw = np.empty(part.shape, f"u{ITEMSIZE[spec.dtype]}")
        self.source.fill(name, part, raw)
        old = numbers(raw, spec.dtype)

        # the values in the new dtype
        out[...] = _rounded(f"{name}: {described(spec)}", old, self.into[name]).view(out.dtype)


def cast_chunks(name: str, parts: Iterable[memoryview], src: str, dst: str) -> Iterator[memoryview]:
    """Yields the bytes of a tensor of dtype ``src`` cast to ``dst``: rounded to nearest, ties to even.

    Raises ``ValueError`` naming ``name`` for a number that is too large.
    """
    for part in parts:
        if src == dst:
            yield part
            continue
        old = numbers(np.frombuffer(part, f"u{ITEMSIZE[src]}"), src)
        yield _rounded(f"{name}: {src}", old, dst).view(np.uint8).data


def _rounded(label: str, old: npt.NDArray[Any], dst: str) -> npt.NDArray[Any]:
    """Returns the nearest numbers of ``dst``, as bits for bfloat16.

    Raises ``ValueError``, which names ``label``, for a number that is too large.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is checked below; NaN stays NaN
        new = old.astype("float32" if dst == "bfloat16" else dst)
    infinite = np.isinf(new)
    if dst == "bfloat16":
        bits = new.view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        new = np.where(np.isnan(new), (bits >> 16) | 0x40, nearest).astype(np.uint16)
        infinite = (new & 0x7FFF) == 0x7F80
    if (infinite & ~np.isinf(old)).any():
        raise ValueError(f"{label} has numbers that are too large for {dst}")
    return new


def numbers(raw: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Returns the numbers of ``dtype`` whose bits are in ``raw``, unsigned integers of the same size.

    numpy has no bfloat16: its numbers are returned as float32, of which they are the upper half.
    """
    if dtype != "bfloat16":
        return raw.view(dtype)
    return np.asarray(raw.astype(np.uint32) << 16).view(np.float32)
