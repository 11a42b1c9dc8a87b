"""Sources whose samples depend on more than their index, and steady ones."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from launcher.data.shuffle import Indices
from launcher.data.source import Source


class Steady(Source):
    """Draws from a generator that the index seeds."""

    def __init__(self, split: str) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 40

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        self.calls += 1
        return (torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(int(i))) for i in indices]),)

    def targets(self, indices: Indices) -> Tensor:
        return torch.from_numpy(indices % 3)


class TorchDraws(Steady):
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        (x,) = super().inputs(indices)
        return (x + 0.1 * torch.randn(x.shape),)


class PythonDraws(Steady):
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (super().inputs(indices)[0] * random.random(),)


class NumpyDraws(Steady):
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (super().inputs(indices)[0] * float(np.random.rand()),)


class Mixes(Steady):
    """Adds the next sample of the batch to each."""

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        (x,) = super().inputs(indices)
        return (x + x.roll(1, 0),)


class HardensByCalls(Steady):
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        (x,) = super().inputs(indices)
        return (x * self.calls,)


class Remembers(Steady):
    """Keeps from inputs() what targets() adds, for a batch of the same call."""

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        self.first = int(indices[0])
        return super().inputs(indices)

    def targets(self, indices: Indices) -> Tensor:
        return (super().targets(indices) + self.first) % 3


class HardensLate(Steady):
    """Other samples after 100 calls."""

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        (x,) = super().inputs(indices)
        return (x * (2 if self.calls > 100 else 1),)


class SortsLargeBatches(Steady):
    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        (x,) = super().inputs(indices)
        return (x[x[:, 0].argsort()] if len(x) > 8 else x,)
