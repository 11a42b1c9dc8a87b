"""Tensors as another floating dtype, where the two programs keep their weights in different ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.checkpoint.full_tensors import FullTensors
from launcher.checkpoint.tensorfile.blob import described
from launcher.plan.values.facts import ITEMSIZE, TensorSpec
from launcher.plan.values.layout import Box

WIDTHS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Binary digits that a number of each dtype keeps.

Others are no plain numbers: fp8 comes with scales of its own.
"""
INTO = ("float32", "float64")


def exact(src: str, dst: str) -> bool:
    """Whether every number of ``src`` is one of ``dst``."""
    return WIDTHS[src] <= WIDTHS[dst]


def differing(specs: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec]) -> dict[str, str]:
    """The new dtype of each tensor that has another than ``wanted`` and can be cast; no other is named."""
    return {
        name: wanted[name].dtype
        for name, spec in specs.items()
        if name in wanted and wanted[name].dtype != spec.dtype and castable(spec.dtype, wanted[name].dtype)
    }


def castable(src: str, dst: str) -> bool:
    """Whether ``Cast`` can make the one of the other."""
    return src in WIDTHS and dst in INTO


@dataclass(frozen=True)
class Cast:
    """``source``, with those tensors that ``into`` names in that dtype: to the nearest number, ties to even.

    ``fill`` raises ``ValueError`` for a number that is too large for its new dtype.
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

        # the old numbers
        spec = self.source.specs[name]
        raw = np.empty(part.shape, f"u{ITEMSIZE[spec.dtype]}")
        self.source.fill(name, part, raw)
        old = numbers(raw, spec.dtype)

        # the new ones, none of which may become infinite
        new = self.into[name]
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large is looked for; NaN stays NaN
            found = old.astype(new)
        if not exact(spec.dtype, new) and (np.isinf(found) & ~np.isinf(old)).any():
            raise ValueError(f"{name}: {described(spec)} has numbers that are too large for {new}")
        out[...] = found.view(out.dtype)


def numbers(raw: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Those of ``dtype`` that lie in ``raw``, unsigned ones as wide.

    bfloat16, which numpy does not know, is the upper half of a float32.
    """
    if dtype != "bfloat16":
        return raw.view(dtype)
    return np.asarray(raw.astype(np.uint32) << 16).view(np.float32)
