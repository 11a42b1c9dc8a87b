"""A data set of any shapes, for modules of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.data.order import Indices
from launcher.data.source import Source


class Shapes(Source):
    """One input a shape: ``[3, 8, 8]`` are floats, ``["int64", 8]`` tokens below 8. Targets are class 0 or 1."""

    def __init__(self, shapes: list[list[Any]], split: str, samples: int = 32) -> None:
        self.shapes, self.split, self.samples = shapes, split, samples

    def __len__(self) -> int:
        return self.samples

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return tuple(torch.stack([self._one(s, int(i)) for i in indices]) for s in self.shapes)

    def targets(self, indices: Indices) -> Tensor:
        return torch.from_numpy(indices % 2)

    def _one(self, shape: list[Any], index: int) -> Tensor:
        g = torch.Generator().manual_seed(index)
        if shape[0] == "int64":
            return torch.randint(0, 8, shape[1:], generator=g)
        return torch.randn(shape, generator=g)


class Holed(Source):
    """Tokens below 64, of whose targets about half are -100; of every ``empty``-th sample all are."""

    def __init__(self, seq_len: int, split: str, samples: int = 8, val_samples: int = 13, empty: int = 4) -> None:
        self.shape, self.empty = (samples if split == "train" else val_samples, seq_len), empty
        g = torch.Generator().manual_seed(1 if split == "train" else 2)
        self.tokens, following = torch.randint(0, 64, (2, *self.shape), generator=g)
        holes = (torch.rand(self.shape, generator=g) < 0.5) | (torch.arange(self.shape[0]) % empty == 0)[:, None]
        self.following = following.masked_fill(holes, -100)

    def __len__(self) -> int:
        return self.shape[0]

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (self.tokens[torch.from_numpy(indices)],)

    def targets(self, indices: Indices) -> Tensor:
        return self.following[torch.from_numpy(indices)]
