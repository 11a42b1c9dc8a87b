"""Documents that share a sample and are to be as if each were alone."""

from __future__ import annotations

from torch import Tensor


def attended(documents: Tensor) -> Tensor:
    """Numbers of documents (batch, time) -> which earlier tokens each attends to (batch, time, time).

    >>> import torch
    >>> attended(torch.tensor([[0, 0, 1]])).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]
    """
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()


def positions(seen: Tensor) -> Tensor:
    """What each attends to (batch, time, time) -> its place in its document (batch, time), from 0 on."""
    return seen.sum(-1) - 1
