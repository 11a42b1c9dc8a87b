"""Tries a user-defined loss or metric on a few samples: its sums and counts must be additive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from launcher.errors import Problem, RunError, owned
from launcher.objective.structure import Output, each, formed
from launcher.plan.values.facts import TensorSpec

FEW = 1 << 24
"""Most elements of an output to try; larger ones are left to the run."""
CLOSE = 1e-9
"""Relative tolerance: another order of additions changes the rounding of float64."""
SAMPLES = 4

Call = Callable[[Output, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Tried:
    """A loss or metric to try.

    Attributes:
        key: the setting that problems name.
        name: the class that problems name.
        call: returns a sum and a count.
        made: the specs of one sample's outputs, named by ``keys`` if the model returns several.
        targets: of all samples that are tried.
        pieces: whether sequences pass in pieces, so that sums over positions must be additive too.
    """

    key: str
    name: str
    call: Call
    made: tuple[TensorSpec, ...]
    targets: Tensor
    pieces: bool
    keys: tuple[str | int, ...] = ()


def problem(tried: Tried, count: Callable[[Tensor], Tensor] | None = None) -> Problem | None:
    """Return what is wrong with ``tried``, if anything; ``count`` is the ``count(target)`` of a loss.

    Raises ``RequestError`` if it cannot be called.
    """
    n = len(tried.targets)
    if n * sum(prod(t.shape) for t in tried.made) > FEW:
        return None
    stream = torch.Generator().manual_seed(0)
    drawn = [_drawn(t, n, stream) for t in tried.made]
    output = formed(drawn if tried.keys else drawn[0], tried.keys)
    shapes = [_shape(t) for t in drawn]
    what = f"an output of shape {shapes[0]}"
    if tried.keys:
        what = ", ".join(f"{key!r}: {shape}" for key, shape in zip(tried.keys, shapes, strict=True))
        what = f"an output of shapes {{{what}}}"
    said = f"{tried.name}: it cannot be called with {what}"
    with owned(tried.key, f"{said} and targets of shape {_shape(tried.targets)}"):
        try:
            return next(_wrong(tried, output, count), None)
        except RunError as error:
            return Problem(tried.key, str(error))


def _shape(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def _drawn(made: TensorSpec, n: int, stream: torch.Generator) -> Tensor:
    """Draw outputs of ``n`` samples: floating-point values in [0, 1), and integers 0 or 1."""
    shape = (n, *made.shape)
    if made.dtype.startswith(("float", "bfloat")):
        return torch.rand(shape, generator=stream, dtype=torch.float64)
    return torch.randint(0, 2, shape, generator=stream).to(getattr(torch, made.dtype))


def _wrong(tried: Tried, output: Output, count: Callable[[Tensor], Tensor] | None) -> Iterator[Problem]:
    # over all samples
    trained = each(output, lambda t: _trained(t) if count is not None else t)
    total, counted = tried.call(trained, tried.targets)
    if count is not None:
        if not total.requires_grad:
            text = "its sum has no gradient: work it out of the output by torch's operations"
            yield Problem(tried.key, f"{tried.name}: {text}")
        alone = count(tried.targets)
        if alone.item() != counted.item():
            text = f"it counts {counted.item():g} where its count(target) is {alone.item():g}"
            yield Problem(tried.key, f"{tried.name}: {text}; both must be the same")

    # over parts of them
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


def _trained(t: Tensor) -> Tensor:
    return t.clone().requires_grad_() if t.is_floating_point() else t


def _cuts(output: Output, targets: Tensor, dim: int) -> Iterator[list[tuple[Output, Tensor]]]:
    """Split the samples in two parts in several ways: a part may contain only targets that do not count."""
    size = targets.shape[dim]
    for first in sorted({1, size // 2, size - 1}):
        lengths = [first, size - first]
        halves = [_part(output, dim, 0, first), _part(output, dim, first, size - first)]
        yield list(zip(halves, targets.split(lengths, dim), strict=True))


def _part(output: Output, dim: int, start: int, length: int) -> Output:
    return each(output, lambda t: t.narrow(dim, start, length))
