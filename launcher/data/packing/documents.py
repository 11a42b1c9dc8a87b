"""Tells the documents of a sample apart: numbers them and masks targets that belong to the next one."""

from __future__ import annotations

from torch import Tensor

from launcher.plan.values.facts import IGNORED


def numbered(ends: Tensor) -> Tensor:
    """Numbers the documents of each sample from 0. A token that ends a document belongs to it.

    >>> import torch
    >>> numbered(torch.tensor([[False, True, True, False]])).tolist()
    [[0, 0, 1, 2]]
    """
    return ends.cumsum(1) - ends.long()


def within(targets: Tensor, ends: Tensor) -> Tensor:
    """Masks the targets of tokens that end a document: they are the first tokens of the next one."""
    return targets.masked_fill(ends, IGNORED)
