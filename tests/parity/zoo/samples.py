"""What every sample is: a pure function of its number, for the oracle and for the run it judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

IGNORED = -100


def inputs(shapes: Sequence[Sequence[Any]], indices: Sequence[int]) -> tuple[Tensor, ...]:
    """``[3, 8]``: floats; ``["int64", 8]``: a permutation of the eight tokens, as long as it is, again and again."""
    return tuple(torch.stack([_one(s, int(i), place) for i in indices]) for place, s in enumerate(shapes))


def targets(shape: Sequence[int], classes: int, ignored: bool, indices: Sequence[int]) -> Tensor:
    """Class numbers; of the ``ignored`` kind a third are -100, in some samples all of them."""
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
