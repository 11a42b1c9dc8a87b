"""Samples as pure functions of their index, for the oracle and for the run that is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

IGNORED = -100


def inputs(shapes: Sequence[Sequence[Any]], indices: Sequence[int]) -> tuple[Tensor, ...]:
    """Inputs of the samples ``indices``, one tensor for each of ``shapes``.

    A shape ``[3, 8]`` has random floats. ``["int64", 12]`` has permutations of the eight tokens, one after another.
    """
    return tuple(torch.stack([_one(s, int(i), place) for i in indices]) for place, s in enumerate(shapes))


def targets(shape: Sequence[int], classes: int, ignored: bool, indices: Sequence[int]) -> Tensor:
    """Class indices. If ``ignored``, about 30 % of them are -100, and all of them in every fifth sample."""
    out = []
    for i in indices:
        g = torch.Generator().manual_seed(7000 + int(i))
        t = torch.randint(0, classes, tuple(shape), generator=g)
        if ignored:
            gone = torch.rand(tuple(shape), generator=g, dtype=torch.float64) < (1.0 if i % 5 == 0 else 0.3)
            t = torch.where(gone, IGNORED, t)
        out.append(t)
    return torch.stack(out)


def _one(shape: Sequence[Any], index: int, place: int) -> Tensor:
    g = torch.Generator().manual_seed(1000 * place + index)
    if shape[0] == "int64":
        n = 1
        for size in shape[1:]:
            n *= size
        return torch.cat([torch.randperm(8, generator=g) for _ in range(-(-n // 8))])[:n].reshape(shape[1:])
    return torch.randn(tuple(shape), generator=g, dtype=torch.float64)
