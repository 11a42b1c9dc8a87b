"""Tries a loss or a metric of the user's own on a few samples: what it says must add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from launcher.errors import Problem, RunError, owned

FEW = 1 << 24
"""Numbers of an output that are tried at most: a larger one is left to the run."""
CLOSE = 1e-9
"""Relative: what is added up in another order differs by roundings of float64."""
SAMPLES = 4

Call = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Tried:
    """``call`` gives a sum and a count; ``shape``: of the output of one sample; ``pieces``: of a sequence."""

    key: str
    name: str
    call: Call
    shape: tuple[int, ...]
    targets: Tensor
    pieces: bool


def problem(tried: Tried, count: Callable[[Tensor], Tensor] | None = None) -> Problem | None:
    """What is wrong with it; ``count``: what a loss says of targets alone.

    Raises ``RequestError`` where it cannot be called.
    """
    n = len(tried.targets)
    if n * prod(tried.shape) > FEW:
        return None
    stream = torch.Generator().manual_seed(0)
    output = torch.rand((n, *tried.shape), generator=stream, dtype=torch.float64)
    said = f"{tried.name}: it cannot be called with an output of shape {tuple(output.shape)}"
    with owned(tried.key, f"{said} and targets of shape {tuple(tried.targets.shape)}"):
        try:
            return next(_wrong(tried, output, count), None)
        except RunError as error:
            return Problem(tried.key, str(error))


def _wrong(tried: Tried, output: Tensor, count: Callable[[Tensor], Tensor] | None) -> Iterator[Problem]:
    # of all samples
    trained = output.clone().requires_grad_(count is not None)
    total, counted = tried.call(trained, tried.targets)
    if count is not None:
        if not total.requires_grad:
            text = "its sum has no gradient: work it out of the output by torch's operations"
            yield Problem(tried.key, f"{tried.name}: {text}")
        alone = count(tried.targets)
        if alone.item() != counted.item():
            text = f"it counts {counted.item():g} where its count(target) is {alone.item():g}"
            yield Problem(tried.key, f"{tried.name}: {text}; both must be the same")

    # of parts of them
    ways = [("samples", 0)] + ([("positions of a sequence", 1)] if tried.pieces else [])
    for what, dim in ways:
        if dim >= tried.targets.dim() or tried.targets.shape[dim] < 2:
            continue
        for parts in _cuts(output, tried.targets, dim):
            first, second = (tried.call(*part) for part in parts)
            for of, whole, a, b in zip(("sum", "count"), (total, counted), first, second, strict=True):
                once, twice = whole.item(), a.item() + b.item()
                if abs(twice - once) > CLOSE * max(abs(twice), abs(once)):
                    text = f"its {of} over all {what} is {once:g}, over two parts of them {twice:g}"
                    why = "a batch is cut into micro batches and over ranks, so sums and counts must add up"
                    yield Problem(tried.key, f"{tried.name}: {text}; {why}")


def _cuts(output: Tensor, targets: Tensor, dim: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """In two parts, in several ways: what counts for nothing may be all of a part."""
    size = targets.shape[dim]
    for first in sorted({1, size // 2, size - 1}):
        lengths = [first, size - first]
        yield list(zip(output.split(lengths, dim), targets.split(lengths, dim), strict=True))
