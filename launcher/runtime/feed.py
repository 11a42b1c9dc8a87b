"""Hands each rank its part of every batch; the plan and the seed say which samples, nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from launcher.plan.plan import Plan

Indices = npt.NDArray[np.int64]


class Samples(Protocol):
    """One split of a data set, by global index."""

    def __len__(self) -> int: ...
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]: ...
    def targets(self, indices: Indices) -> Tensor: ...


@dataclass(frozen=True)
class Batch:
    """``inputs`` only where the first stage is, ``targets`` where the last is; ``valid`` samples are no padding."""

    inputs: tuple[Tensor, ...]
    targets: Tensor | None
    valid: int


@dataclass(frozen=True)
class Feed:
    """``order(step, batch_size, n)``: global indices of one step. ``part``: this rank's data-parallel place."""

    train: Samples
    val: Samples
    order: Callable[[int, int, int], Indices]
    plan: Plan
    part: int
    first: bool
    last: bool
    device: torch.device
    floating: torch.dtype
    limit: int | None = None

    def batch(self, step: int) -> Batch:
        """This rank's samples of optimizer step ``step`` (0-based)."""
        n = len(self.train) if self.limit is None else min(self.limit, len(self.train))
        indices = self.order(step, self.plan.sizes.global_batch, n)
        return self._read(self.train, self._mine(indices), self.plan.sizes.local_batch)

    def held_out(self, batches: int | None) -> Iterator[Batch]:
        """Every held-out sample once, in order, in batches of the training shape; the last is padded by repetition."""
        size, n = self.plan.sizes.global_batch, len(self.val)
        count = -(-n // size) if batches is None else min(batches, -(-n // size))
        for b in range(count):
            indices = np.arange(b * size, (b + 1) * size)
            mine = self._mine(indices)
            yield self._read(self.val, np.minimum(mine, n - 1), int((mine < n).sum()))

    def _mine(self, indices: Indices) -> Indices:
        n = self.plan.sizes.local_batch
        return indices[self.part * n : (self.part + 1) * n]

    def _read(self, source: Samples, indices: Indices, valid: int) -> Batch:
        inputs = tuple(map(self._move, source.inputs(indices))) if self.first else ()
        return Batch(inputs, self._move(source.targets(indices)) if self.last else None, valid)

    def _move(self, t: Tensor) -> Tensor:
        return t.to(self.device, self.floating if t.is_floating_point() else t.dtype)
