"""The model as its author wrote it, and its first weights.

Tensors, or rows of a tensor, that every construction makes equal must be equal here too. For the others some
figures are computed: they may exceed the range of several constructions by a multiple of that range, so no
distribution is assumed. Few constructions and a wide margin come first; a suspicion is settled with many.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from launcher.job.schema.job import Job
from launcher.models.build import build_model

KEPT = {"fp64": torch.float64}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def kept(precision: str) -> torch.dtype:
    """The dtype of weights, gradients and optimizer state."""
    return KEPT.get(precision, torch.float32)


def construct(job: Job, seed: int) -> nn.Module:
    """``Model()`` after ``torch.manual_seed(seed)``, in training mode.

    Restores all random states.
    """
    default = torch.get_default_dtype()
    with _streams():
        torch.manual_seed(seed)
        torch.set_default_dtype(kept(job.train.precision))
        try:
            model = build_model(job.model, job.security.allow)
            model.train()  # whatever mode its constructor left it in
            return model
        finally:
            torch.set_default_dtype(default)


@contextmanager
def _streams() -> Iterator[None]:
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, buffer and tensor in a plain attribute of a module, by its first name."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= dict(model.named_buffers())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                tensors[f"{path}.{name}".lstrip(".")] = value
    return tensors


def names(model: nn.Module) -> list[frozenset[str]]:
    """All names of each parameter and buffer."""
    by_id: dict[int, set[str]] = {}
    tensors = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, t in (pair for named in tensors for pair in named):
        by_id.setdefault(id(t), set()).add(name)
    return [frozenset(same) for same in by_id.values()]


def persistent(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint contains, by first name."""
    lost = {
        id(b) for m in model.modules() for n, b in m._buffers.items() if n in m._non_persistent_buffers_set
    }  # fmt: skip
    return {n: b for n, b in model.named_buffers() if id(b) not in lost}


@torch.no_grad()
def put(model: nn.Module, numbers: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Moves ``model`` to ``device`` and sets the tensors named in ``numbers``, by any of their names."""
    move(model, device)
    for path, module in model.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            full = f"{path}.{name}".lstrip(".")
            if isinstance(value, Tensor) and full in numbers:
                value.copy_(numbers[full])
    return model


def move(model: nn.Module, device: torch.device) -> None:
    """Moves every tensor of ``model`` to ``device``; keeps tensors shared between names shared.

    ``Module.to`` makes a new parameter for each name, if a tensor on the device cannot replace the one on the
    CPU, and always a new buffer.
    """
    before: dict[int, Tensor] = {}
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        kinds: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
        for owner in kinds:
            for name, value in owner.items():
                if isinstance(value, Tensor):
                    before[id(value)] = value  # kept alive, so that no other has its id
                    places.setdefault(id(value), []).append((owner, name))

    model.to(device)
    for key, same in places.items():
        registered = [(owner, name) for owner, name in same if owner[name] is not before[key]]
        owner, name = (registered or same)[0]
        moved = owner[name].to(device)
        for owner, name in same:
            owner[name] = moved


def kept_as(made: Mapping[str, Tensor], plain: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """``plain`` as a run may keep it: frozen parameters in half precision if those in ``made`` are."""
    low = LOW.get(precision)
    frozen = {n for n, t in plain.items() if isinstance(t, nn.Parameter) and not t.requires_grad}
    half = {n for n in frozen if low is not None and n in made and made[n].dtype == low}
    return {n: t.detach().to(low) if n in half else t for n, t in plain.items()}


def another(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that shares only its trainable parameters.

    The forward may change a frozen one, such as a teacher's, once on every rank.
    """
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if p.requires_grad})


def share(model: nn.Module, weights: nn.Module) -> nn.Module:
    """``model`` with the trainable parameters of ``weights``."""
    for path, module in weights.named_modules():
        for name, p in module._parameters.items():
            if p is None or not p.requires_grad:
                continue
            model.get_submodule(path)._parameters[name] = p
    return model


def computing(model: nn.Module, precision: str) -> Callable[..., Any]:
    """A function that runs ``model``; in half precision it casts the weights in every call.

    Parameters of modules with running statistics are not cast.
    """
    if precision not in LOW:
        return model
    beside = [m for m in model.modules() if any(b.is_floating_point() for b in persistent_of(m))]
    wide = {id(p) for m in beside for p in m._parameters.values()}
    low = LOW[precision]

    def cast(p: Tensor) -> Tensor:
        return p.to(low) if p.is_floating_point() and id(p) not in wide else p

    def run(*xs: Any) -> Any:
        return functional_call(model, {n: cast(p) for n, p in model.named_parameters()}, xs)

    return run


def persistent_of(module: nn.Module) -> list[Tensor]:
    """The buffers of ``module`` itself that a checkpoint contains."""
    return [
        b for n, b in module._buffers.items() if b is not None and n not in module._non_persistent_buffers_set
    ]


FEW, MANY = 4, 24
WIDE, NARROW = 3.0, 2.0
"""How many ranges a figure may lie outside the range of the constructions' figures."""
ROUNDINGS = 16
CHANCE = 0.01
"""A larger share of equal values in two constructions is no continuous draw: rows may agree by chance."""
SMALLEST = 1e-300
FIGURES = ("standard deviation", "largest number", "mean", "share of zeros")

Figures = tuple[float, ...]
Numbers = Mapping[str, Tensor]

TRAVEL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Floating dtypes that ranks send each other unchanged."""


@dataclass
class Seen:
    """What constructions made of a tensor: rows that are ``alike``; the most equal values in ``others``."""

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
        """Why ``made`` does not fit the constructions; "" if it may."""
        # ranks may have sent it in a wider dtype
        if self.first.dtype not in TRAVEL:
            narrow = made.to(self.first.dtype)
            if narrow.to(made.dtype).equal(made):
                made = narrow

        # checks without statistics: dtype and shape, finiteness, values that are alike in all constructions
        if made.shape != self.first.shape or made.dtype != self.first.dtype:
            return f"is {_kind(made)}, in a plain construction {_kind(self.first)}"
        if not torch.isfinite(_wide(made)).all() and torch.isfinite(_wide(self.first)).all():
            return "has numbers that are not finite, but none in a plain construction"
        wrong = self.alike & ~_same(made, self.first).all(1)
        if wrong.any() and (self.alike.all() or self.others < CHANCE):
            where = "" if self.alike.all() else f" in {int(wrong.sum())} of {len(wrong)} rows"
            return f"is not what {len(self.figures)} plain constructions make alike{where}"
        if self.alike.all() or not torch.isfinite(_wide(self.first)).all():
            return ""

        # random values: no figure may be far from those of the plain constructions
        measured = figures(_wide(made))
        for i, name in enumerate(FIGURES):
            lo, hi = min(f[i] for f in self.figures), max(f[i] for f in self.figures)
            least = _least(i, self.first, self.figures)
            if not lo - ranges * (hi - lo) - least <= measured[i] <= hi + ranges * (hi - lo) + least:
                usual = f"in {len(self.figures)} plain constructions {_between(i, lo, hi)}"
                return f"its {name} is {_figure_text(i, measured)}, {usual}"
        return ""


def complaints(plain: Numbers, construct: Callable[[int], Numbers], made: Numbers) -> dict[str, str]:
    """Why tensors of ``made`` do not fit plain constructions; ``construct(n)`` makes another one."""
    constructed = {
        name: Seen(t, torch.ones(_row_count(t), dtype=torch.bool))
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


def _more(constructed: Mapping[str, Seen], construct: Callable[[int], Numbers], which: range) -> None:
    for n in which:
        numbers = construct(n)
        for name, s in constructed.items():
            s.add(numbers[name])


def _wrong(constructed: Mapping[str, Seen], made: Numbers, ranges: float) -> Iterator[tuple[str, str]]:
    for name, s in constructed.items():
        if text := s.complaint(made[name], ranges):
            yield name, text


@torch.no_grad()
def figures(t: Tensor) -> Figures:
    """The logarithms of the standard deviation and the largest size, then the mean and the share of zeros."""
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
    """A tolerance: constructions may agree on a figure to the last bit, or have no zero by chance."""
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
    """Which values are equal up to a few roundings, one row per row of the tensor."""
    eps = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    a, b = _wide(a), _wide(b)
    same = a == b
    if a.is_floating_point():
        same |= (a - b).abs() <= ROUNDINGS * eps * b.abs()
        same |= a.isnan() & b.isnan()
    return same.reshape(_row_count(a), a.numel() // max(_row_count(a), 1))
