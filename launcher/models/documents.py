"""Masks and positions of packed documents: each gives what it would give alone in its sample."""

from __future__ import annotations

from torch import Tensor


def attended(documents: Tensor) -> Tensor:
    """Return the mask (batch, time, time) by which a token attends only to its own document, causally.

    ``documents`` (batch, time) has the number of each token's document.

    >>> import torch
    >>> attended(torch.tensor([[0, 0, 1]])).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]
    """
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()


def positions(seen: Tensor) -> Tensor:
    """Return each token's position in its document (batch, time), from 0 on, by the mask of ``attended``."""
    return seen.sum(-1) - 1
