"""The shape and dtype of a tensor, without its data."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from launcher.plan.values.dtypes import WIDTH


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTH[self.dtype]
