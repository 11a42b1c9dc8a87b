"""Views of a data set that make a batch unusual: a few samples, over and over, or an end within a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Indices = npt.NDArray[np.int64]


class Samples(Protocol):
    """What a data set offers."""

    def __len__(self) -> int: ...
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]: ...
    def targets(self, indices: Indices) -> Tensor: ...


@dataclass(frozen=True)
class Alike:
    """Every position of a sample is its first: routing by position or token sends all of it the same way."""

    of: Samples

    def __len__(self) -> int:
        return len(self.of)

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        def first(x: Tensor) -> Tensor:
            return x[:, :1].expand_as(x).contiguous() if x.dim() > 1 else x

        return tuple(map(first, self.of.inputs(indices)))

    def targets(self, indices: Indices) -> Tensor:
        return self.of.targets(indices)


@dataclass(frozen=True)
class First:
    """The first ``n`` samples, or as many as there are."""

    of: Samples
    n: int

    def __len__(self) -> int:
        return min(self.n, len(self.of))

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return self.of.inputs(indices)

    def targets(self, indices: Indices) -> Tensor:
        return self.of.targets(indices)


@dataclass(frozen=True)
class Narrow:
    """A batch in which each data-parallel rank reads the ``pick``-th of its samples only, over and over.

    ``positions``: and of it the first position only. Ranks that read different samples leave different
    experts idle.
    """

    pick: int
    positions: bool

    def order(self, indices: Indices, local: int) -> Indices:
        """``indices`` of the global batch, ``local`` of them a rank's."""
        places = np.arange(len(indices), dtype=np.int64)
        return np.take(indices, places - places % local + self.pick % local)

    def view(self, of: Samples) -> Samples:
        return Alike(of) if self.positions else of


def held_out(samples: Samples, batch: int) -> First:
    """More than one batch, and an end that no multiple of a batch hits, where there are samples enough."""
    beyond = batch // 2 + 1 if batch > 3 else max(1, batch // 2)
    n = min(len(samples), batch + beyond)
    if n > 1 and n % batch == 0:
        n -= 1
    return First(samples, n)
