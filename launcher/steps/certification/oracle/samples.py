"""Data sets of the certificate's reference training, and batches for special checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Indices = npt.NDArray[np.int64]


class ReferenceSamples(Protocol):
    """The interface of a data set."""

    def __len__(self) -> int: ...
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]: ...
    def targets(self, indices: Indices) -> Tensor: ...


@dataclass(frozen=True)
class EqualPositions:
    """Replaces every position of a sample by the first.

    A router that looks at positions or at tokens then treats all positions of the sample in the same way.
    """

    of: ReferenceSamples

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
    """The first ``n`` samples, or all if there are fewer."""

    of: ReferenceSamples
    n: int

    def __len__(self) -> int:
        return min(self.n, len(self.of))

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return self.of.inputs(indices)

    def targets(self, indices: Indices) -> Tensor:
        return self.of.targets(indices)


@dataclass(frozen=True)
class Narrow:
    """A batch in which each data-parallel rank repeats the ``pick``-th of its samples.

    Each rank then uses few experts, and other ranks, with other samples, use other experts. ``positions``:
    within the sample, the first position is repeated too.
    """

    pick: int
    positions: bool

    def order(self, indices: Indices, local: int) -> Indices:
        """Repeats one sample per rank in ``indices`` of the global batch; each rank has ``local`` of them."""
        places = np.arange(len(indices), dtype=np.int64)
        return np.take(indices, places - places % local + self.pick % local)

    def view(self, of: ReferenceSamples) -> ReferenceSamples:
        return EqualPositions(of) if self.positions else of


def held_out(samples: ReferenceSamples, batch: int) -> First:
    """Returns the first samples: more than one batch, but no whole number of batches, if there are enough."""
    beyond = batch // 2 + 1 if batch > 3 else max(1, batch // 2)
    n = min(len(samples), batch + beyond)
    if n > 1 and n % batch == 0:
        n -= 1
    return First(samples, n)
