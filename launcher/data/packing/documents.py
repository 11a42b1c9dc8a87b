"""Documents within samples: which tokens are of which, and which targets are of another one."""

from __future__ import annotations

from torch import Tensor

from launcher.plan.values.facts import IGNORED


def numbered(ends: Tensor) -> Tensor:
    """The number of each token's document in its sample, from 0 on; a token that ends one is of that one.

    >>> import torch
    >>> numbered(torch.tensor([[False, True, True, False]])).tolist()
    [[0, 0, 1, 2]]
    """
    return ends.cumsum(1) - ends.long()


def within(targets: Tensor, ends: Tensor) -> Tensor:
    """``targets`` without those of tokens that end a document: they would be the first ones of the next."""
    return targets.masked_fill(ends, IGNORED)
