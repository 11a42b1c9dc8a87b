"""Compares the weights at step 0 with those of plain constructions.

Tensors, or rows of a tensor, that every construction makes equal must be equal here too. All others are
compared by figures such as the mean. A figure may lie outside the range of several constructions by a
multiple of that range, so no distribution is assumed. First there are few constructions and a wide margin;
tensors that fail are compared with many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import exp, log

import torch
from torch import Tensor

FEW, MANY = 4, 24
WIDE, NARROW = 3.0, 2.0
"""How many ranges a figure may lie outside the range of the constructions' figures."""
ROUNDINGS = 16
CHANCE = 0.01
"""A larger fraction of equal values in two constructions is no continuous draw: rows may agree by chance."""
SMALLEST = 1e-300
FIGURES = ("standard deviation", "largest number", "mean", "share of zeros")
Figures = tuple[float, ...]
Numbers = Mapping[str, Tensor]
TRAVEL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Floating dtypes that ranks send each other unchanged."""


@dataclass
class ComparedTensor:
    """A tensor in all constructions: rows that are ``alike``; the most equal values in ``others``."""

    first: Tensor
    alike: Tensor
    others: float = 0.0
    figures: list[Figures] = field(default_factory=list)

    def add(self, t: Tensor) -> None:
        same = _same(t, self.first)
        self.alike &= same.all(1)
        if self.figures and not self.alike.all():
            self.others = max(self.others, same[~self.alike].double().mean().item())
        self.figures.append(figures(_wide(t)))

    def complaint(self, made: Tensor, ranges: float) -> str:
        """Returns why ``made`` does not fit the constructions; "" if it may."""
        # ranks may have sent it in a wider dtype
        if self.first.dtype not in TRAVEL:
            narrow = made.to(self.first.dtype)
            if narrow.to(made.dtype).equal(made):
                made = narrow

        # checks without statistics: dtype and shape, finiteness, values that are equal in all constructions
        if made.shape != self.first.shape or made.dtype != self.first.dtype:
            return f"is {_kind(made)}, but {_kind(self.first)} in a plain construction"
        if not torch.isfinite(_wide(made)).all() and torch.isfinite(_wide(self.first)).all():
            return "has numbers that are not finite; a plain construction has none"
        wrong = self.alike & ~_same(made, self.first).all(1)
        if wrong.any() and (self.alike.all() or self.others < CHANCE):
            where = "" if self.alike.all() else f" in {int(wrong.sum())} of {len(wrong)} rows"
            return f"differs from the equal values of {len(self.figures)} plain constructions{where}"
        if self.alike.all() or not torch.isfinite(_wide(self.first)).all():
            return ""

        # random values: no figure may be far from those of the plain constructions
        measured = figures(_wide(made))
        for i, name in enumerate(FIGURES):
            lo, hi = min(f[i] for f in self.figures), max(f[i] for f in self.figures)
            least = _least(i, self.first, self.figures)
            if not lo - ranges * (hi - lo) - least <= measured[i] <= hi + ranges * (hi - lo) + least:
                usual = f"in {len(self.figures)} plain constructions it is {_between(i, lo, hi)}"
                return f"its {name} is {_figure_text(i, measured)}; {usual}"
        return ""


def complaints(plain: Numbers, construct: Callable[[int], Numbers], made: Numbers) -> dict[str, str]:
    """Returns why tensors of ``made`` do not fit plain constructions; ``construct(n)`` makes another one."""
    constructed = {
        name: ComparedTensor(t, torch.ones(_row_count(t), dtype=torch.bool))
        for name, t in plain.items()
        if name in made
    }
    for s in constructed.values():
        s.add(s.first)
    _more(constructed, construct, range(1, FEW))
    wrong = dict(_wrong(constructed, made, WIDE))
    if wrong:
        constructed = {name: constructed[name] for name in wrong}
        _more(constructed, construct, range(FEW, MANY))
        wrong = dict(_wrong(constructed, made, NARROW))
    return wrong


def _more(
    constructed: Mapping[str, ComparedTensor], construct: Callable[[int], Numbers], which: range
) -> None:
    for n in which:
        numbers = construct(n)
        for name, s in constructed.items():
            t = numbers.get(name)
            if t is not None and t.shape == s.first.shape:  # a constructor may draw its sizes
                s.add(t)


def _wrong(
    constructed: Mapping[str, ComparedTensor], made: Numbers, ranges: float
) -> Iterator[tuple[str, str]]:
    for name, s in constructed.items():
        if text := s.complaint(made[name], ranges):
            yield name, text


@torch.no_grad()
def figures(t: Tensor) -> Figures:
    """Returns the logs of the standard deviation and largest size, the mean, and the fraction of zeros."""
    if not t.numel():
        return (0.0,) * len(FIGURES)
    flat = (torch.view_as_real(t) if t.is_complex() else t).double().flatten()
    spread, largest = flat.std(correction=0).item(), flat.abs().max().item()
    return (
        log(max(spread, SMALLEST)),
        log(max(largest, SMALLEST)),
        flat.mean().item(),
        (flat == 0).double().mean().item(),
    )


def _least(figure: int, t: Tensor, observed: list[Figures]) -> float:
    """Returns a tolerance: constructions may agree on a figure to the last bit, or have no zero by chance."""
    size = max(abs(f[2]) for f in observed) + max(exp(f[0]) for f in observed)
    return (1e-3, 1e-3, 1e-3 * size, 10 / max(t.numel(), 1))[figure]


def _figure_text(figure: int, figures: Figures) -> str:
    size = exp(figures[figure]) if figure < 2 else figures[figure]
    return f"{0.0 if abs(size) <= 2 * SMALLEST else size:.3g}"


def _between(figure: int, lo: float, hi: float) -> str:
    a, b = (_figure_text(figure, (x,) * len(FIGURES)) for x in (lo, hi))
    return a if a == b else f"{a} to {b}"


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _row_count(t: Tensor) -> int:
    return len(t) if t.dim() > 1 else 1


def _wide(t: Tensor) -> Tensor:
    """Widens 8-bit floats, which have no arithmetic."""
    return t.float() if t.is_floating_point() and t.itemsize == 1 else t


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Returns which values are equal up to a few roundings, one row per row of the tensor."""
    eps = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    a, b = _wide(a), _wide(b)
    same = a == b
    if a.is_floating_point():
        same |= (a - b).abs() <= ROUNDINGS * eps * b.abs()
        same |= a.isnan() & b.isnan()
    return same.reshape(_row_count(a), a.numel() // max(_row_count(a), 1))
