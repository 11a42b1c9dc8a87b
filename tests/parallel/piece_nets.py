"""Modules that look at several positions, some of which can process a sequence in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class RunningSum(nn.Module):
    """Each position gets the sum of the inputs so far: a user's module whose state is one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.piece(x, start=0, past=())[0]

    def piece(self, x: Tensor, *, start: int, past: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, tuple[Tensor, ...]]:
        sums = self.into(x).cumsum(1) / 4
        if past:
            sums = sums + past[-1][0]
        return torch.tanh(sums), (sums[:, -1:],)


class Summing(nn.Module):
    def __init__(self, sums: type[nn.Module] = RunningSum) -> None:
        super().__init__()
        self.embed, self.a, self.b, self.head = nn.Embedding(8, 6), sums(), sums(), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.embed(tokens))))


class Backwards(nn.Module):
    """Looks at other positions and has no method to do so in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.into(x).flip(1)


class Sorted(nn.Module):
    """Does something unusual to each position, but uses that position alone."""

    positionwise = True

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.into(x).sort(-1).values


class Flipping(Summing):
    def __init__(self) -> None:
        super().__init__(Backwards)


class Sorting(Summing):
    def __init__(self) -> None:
        super().__init__(Sorted)


class Twice(Summing):
    """A model that runs one module twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.a(self.embed(tokens)))))


class Positions(Summing):
    """Position numbers made in the glue: each piece would count from 0."""

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + torch.arange(tokens.shape[1])[:, None]
        return self.head(self.b(self.a(h)))
