"""Data sets of any shape, for user-written modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.data.shuffle import Indices
from launcher.data.source import Source


class Shapes(Source):
    """One input per entry of ``shapes``: ``[3, 8, 8]`` are floats, ``["int64", 8]`` tokens below 8.

    Targets are class 0 or 1 in the shape ``target``: ``[]`` is one per sample.
    """

    def __init__(self, shapes: list[list[Any]], split: str, samples: int = 32, target: Sequence[int] = ()) -> None:
        self.shapes, self.split, self.samples, self.target = shapes, split, samples, tuple(target)

    def __len__(self) -> int:
        return self.samples

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return tuple(torch.stack([self._one(s, int(i)) for i in indices]) for s in self.shapes)

    def targets(self, indices: Indices) -> Tensor:
        y = torch.from_numpy(indices % 2)
        return y.view(-1, *(1 for _ in self.target)).expand(-1, *self.target).contiguous()

    def _one(self, shape: list[Any], index: int) -> Tensor:
        g = torch.Generator().manual_seed(index)
        if shape[0] == "int64":
            return torch.randint(0, 8, shape[1:], generator=g)
        return torch.randn(shape, generator=g)


class Holed(Source):
    """Tokens below 64. About half of the targets are ``hole``; in every ``empty``-th sample all of them are."""

    def __init__(
        self, seq_len: int, split: str, samples: int = 8, val_samples: int = 13, empty: int = 4, hole: int = -100
    ) -> None:
        self.shape, self.empty = (samples if split == "train" else val_samples, seq_len), empty
        g = torch.Generator().manual_seed(1 if split == "train" else 2)
        self.tokens, following = torch.randint(0, 64, (2, *self.shape), generator=g)
        holes = (torch.rand(self.shape, generator=g) < 0.5) | (torch.arange(self.shape[0]) % empty == 0)[:, None]
        self.following = following.masked_fill(holes, hole)

    def __len__(self) -> int:
        return self.shape[0]

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (self.tokens[torch.from_numpy(indices)],)

    def targets(self, indices: Indices) -> Tensor:
        return self.following[torch.from_numpy(indices)]


class Labeled(Source):
    """Floats of ``shape``, with targets below ``classes`` of shape ``target``; ``wrong``: one of sample 5.

    ``more``: returns more targets than requested; ``later``: only for more than 2 indices.
    """

    def __init__(
        self, shape: list[int], target: list[int], classes: int, split: str, samples: int = 24, held_out: int = 13,
        dtype: str = "int64", more: int = 0, later: int = 0, wrong: int | None = None, holes: float = 0.0,
        other: str | None = None,
    ) -> None:  # fmt: skip
        self.n, self.shape, self.more, self.later = samples if split == "train" else held_out, shape, more, later
        g = torch.Generator().manual_seed(1 if split == "train" else 2)
        self.x = torch.randn((self.n, *shape), generator=g, dtype=torch.float64)
        y = torch.randint(0, classes, (self.n, *target), generator=g)
        y[torch.rand(y.shape, generator=g) < holes] = -100
        if wrong is not None:
            y[5].view(-1)[-1] = wrong
        self.y = y.to(getattr(torch, other if other is not None and split == "val" else dtype))

    def __len__(self) -> int:
        return self.n

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (self.x[torch.from_numpy(indices)],)

    def targets(self, indices: Indices) -> Tensor:
        more = self.more + (self.later if len(indices) > 2 else 0)
        return torch.cat([self.y[torch.from_numpy(indices)], self.y[:more]])


class Measured(Source):
    """Tokens below 64, with targets from 0 to 1 of shape ``target``; ``wrong``: a target of sample 5."""

    def __init__(
        self, seq_len: int, target: list[int], split: str, samples: int = 8, val_samples: int = 13,
        wrong: float | None = None,
    ) -> None:  # fmt: skip
        self.n = samples if split == "train" else val_samples
        g = torch.Generator().manual_seed(1 if split == "train" else 2)
        self.tokens = torch.randint(0, 64, (self.n, seq_len), generator=g)
        self.values = torch.rand((self.n, *target), generator=g, dtype=torch.float64)
        if wrong is not None:
            self.values[5].view(-1)[-1] = wrong

    def __len__(self) -> int:
        return self.n

    def inputs(self, indices: Indices) -> tuple[Tensor, ...]:
        return (self.tokens[torch.from_numpy(indices)],)

    def targets(self, indices: Indices) -> Tensor:
        return self.values[torch.from_numpy(indices)]
