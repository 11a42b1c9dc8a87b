"""Selects the unusual samples of a data set, with which a model is tried.

In some models only a rare sample changes what a forward does to others: the one short sequence among many, or
the one number that exceeds a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

RARE = 1 / 8
"""At most this part of the samples may share a number that makes a sample unusual."""


def unusual_first(inputs: Sequence[Tensor], count: int) -> Tensor:
    """Returns the places of ``count`` samples: up to half are unusual and come first, the others are spread.

    Args:
        inputs: the inputs of all samples, with a row for each.
        count: at most the number of samples.
    """
    total = len(inputs[0])
    ordered = zip_longest(*(_extremes(x.reshape(total, -1)) for x in inputs))
    unusual = dict.fromkeys(at for each in ordered for at in each if at is not None)
    first = [*unusual][: count // 2]
    others = [at for at in range(total) if at not in first]
    evenly = torch.linspace(0, len(others) - 1, count - len(first)).long().tolist()
    return torch.tensor(first + [others[at] for at in evenly])


def _extremes(rows: Tensor) -> Iterator[int]:
    """Yields the row with the most repeats, which may be padding, and rows that are extreme in other ways."""
    if not rows.numel():
        return
    numbers = (rows.abs() if rows.is_complex() else rows).double()
    repeats = (numbers[:, 1:] == numbers[:, :-1]).sum(1)
    sizes, sums = numbers.abs().amax(1), numbers.sum(1)
    for score in (repeats, sizes, -sums, sums, -sizes, -repeats):
        at = int(score.argmax())
        if (score == score[at]).sum() <= max(1, RARE * len(score)):
            yield at
