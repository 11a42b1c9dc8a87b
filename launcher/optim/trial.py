"""Runs one of the user's own optimizers on small tensors, whole or cut in two."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from launcher.errors import RequestError, of_users
from launcher.optim.build import keep_rates, scale_lr
from launcher.optim.state_packing import pack, unpack

Build = Callable[[list[nn.Parameter]], Optimizer]
Shape = tuple[int, ...]

STEPS, RESUMED = 24, 11
"""How long it is tried, and after how many steps its state moves to another instance."""
SCALES = (1.0, 1e3, 1e-3, 30.0, 0.1)
"""Of the gradients, step by step: a limit on a norm is passed, and is kept."""
SPIKES = {1: slice(0, 1), 4: slice(-1, None)}
RATES = (1.0, 0.5, 0.25, 1.0)
LONGEST = {1: 6000, 2: 136, 3: 24}
"""A dim, by how many there are, else 8: some classes treat 128 rows, or 4096 numbers, unlike fewer."""
OURS = frozenset({"params", "param_names", "lr", "initial_lr"})


class Broken(Exception):
    """Why the class cannot train."""


@dataclass(frozen=True)
class TrialCut:
    """Two pieces of every tensor along ``dim``: a third and the rest; if ``empty``, all and nothing."""

    dim: int | None = None
    empty: bool = False

    def pieces(self, t: Tensor) -> tuple[Tensor, ...]:
        if self.dim is None or self.dim >= t.ndim:
            return (t,)
        n = t.shape[self.dim]
        fewest = 1 if self.empty else 2
        if n < fewest:
            return (t,)
        first = n if self.empty else -(-n // 3)
        return t.narrow(self.dim, 0, first), t.narrow(self.dim, first, n - first)

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0] if self.dim is None or len(pieces) == 1 else torch.cat([*pieces], self.dim)


@dataclass
class Observation:
    """What a run left: the tensors, the optimizer, and which values of its groups it changed itself.

    ``first``: the keys of its state after one step; ``paths``: how far each number went in all steps
    together.
    """

    params: list[nn.Parameter]
    optimizer: Optimizer
    counters: tuple[str, ...]
    first: tuple[str, ...]
    paths: list[Tensor]


def small(shapes: Sequence[Shape]) -> list[Shape]:
    """The largest and the smallest of each number of dims, made small; at least two tensors in all."""
    out: list[Shape] = []
    for dims in sorted({len(s) for s in shapes}, reverse=True):
        alike = sorted((s for s in shapes if len(s) == dims), key=prod)
        longest = LONGEST.get(dims, 8)
        out += dict.fromkeys(tuple(min(n, longest) for n in s) for s in (alike[-1], alike[0]))
    return out if len(out) > 1 else out * 2


@dataclass
class Trial:
    """``device`` is the one asked for, which is not the one tried on."""

    build: Build
    shapes: list[Shape]
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    starts: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.starts = [torch.randn(s, generator=g, dtype=self.dtype) for s in self.shapes]

    def gradients(self, step: int) -> list[Tensor]:
        """Random numbers whose sizes tell beginning from end, steps and tensors apart.

        Sizes grow from the beginning of a tensor to its end, and change with steps and tensors, each in
        its own way; now and then the first or the last number is far larger than the rest.
        """
        g = torch.Generator().manual_seed(1 + step)
        out = []
        for i, s in enumerate(self.shapes):
            size = torch.linspace(0.1, 2.0, prod(s), dtype=self.dtype)
            size = size * SCALES[(step + 2 * i) % len(SCALES)] * (1 + i)
            if spike := SPIKES.get((step + i) % 6):
                size[spike] *= 1e4
            out.append(torch.randn(s, generator=g, dtype=self.dtype) * size.reshape(s))
        return out

    def made(self, tensors: Sequence[Tensor]) -> tuple[list[nn.Parameter], Optimizer]:
        params = [nn.Parameter(t.clone(memory_format=torch.contiguous_format)) for t in tensors]
        try:
            optimizer = self.build(params)
        except RequestError:
            raise
        except Exception as error:
            raise Broken(
                f"it cannot be constructed for this model's parameters: {of_users(error)}"
            ) from error
        if wrong := _unusable(optimizer):
            raise Broken(wrong)

        # as a run would have it
        keep_rates(optimizer)
        torchs = type(optimizer).__module__.startswith("torch.optim.")
        for group in optimizer.param_groups:
            if group.get("capturable") and self.device == "cpu" and torchs:
                why = "capturable=True is for graphs of an accelerator, and torch takes no such step on CPUs"
                raise Broken(f"{why}; set optim.capturable=false")
            if self.device != "cpu" and group.get("capturable"):
                group["capturable"] = False  # which no CPU can
        return params, optimizer

    def run(self, cut: TrialCut = TrialCut(), seed: int = 0) -> list[Tensor]:
        """The tensors afterwards, cut and put together again."""
        torch.manual_seed(seed)
        lengths = [len(cut.pieces(t)) for t in self.starts]
        params, optimizer = self.made([p for t in self.starts for p in cut.pieces(t)])
        for step in range(STEPS):
            advance(params, optimizer, [p for g in self.gradients(step) for p in cut.pieces(g)], step)
        left = iter(params)
        return [cut.joined([next(left).detach() for _ in range(n)]) for n in lengths]

    def alone(self) -> list[Tensor]:
        """Each tensor in an optimizer of its own."""
        torch.manual_seed(0)
        made = [self.made([t]) for t in self.starts]
        for step in range(STEPS):
            for (params, optimizer), g in zip(made, self.gradients(step), strict=True):
                advance(params, optimizer, [g], step)
        return [p.detach() for params, _ in made for p in params]

    def observed(self) -> Observation:
        """As ``run``, looking at the groups after every step."""
        torch.manual_seed(0)
        params, optimizer = self.made(self.starts)
        before = [_values(g) for g in optimizer.param_groups]
        changed: dict[str, None] = {}
        first: tuple[str, ...] = ()
        paths = [torch.zeros_like(t) for t in self.starts]
        for step in range(STEPS):
            were = [p.detach().clone() for p in params]
            advance(params, optimizer, self.gradients(step), step)
            if step == 0:
                first = keys(params, optimizer)

            # how far each number went, and what of the groups is new
            for path, p, old in zip(paths, params, were, strict=True):
                path += (p.detach() - old).abs()
            for was, group in zip(before, optimizer.param_groups, strict=True):
                now = _values(group)
                changed |= dict.fromkeys(k for k in now if k not in was or not _same(was[k], now[k]))
        return Observation(params, optimizer, tuple(sorted(changed)), first=first, paths=paths)

    def resumed(self, counters: tuple[str, ...]) -> list[Tensor]:
        """As ``run``, with the state handed to another instance on the way."""
        torch.manual_seed(0)
        params, optimizer = self.made(self.starts)
        for step in range(STEPS):
            if step == RESUMED:
                after, other = self.made([p.detach() for p in params])
                for p, q in zip(params, after, strict=True):
                    unpack(other, q, {n: t.clone() for n, t in pack(optimizer, p, counters).items()})
                params, optimizer = after, other
            advance(params, optimizer, self.gradients(step), step)
        return [p.detach() for p in params]

    def unused(self) -> None:
        """The first tensor never has a gradient, the last does not always."""
        params, optimizer = self.made(self.starts)
        for step in range(4):
            grads: list[Tensor | None] = [*self.gradients(step)]
            grads[0] = None
            if step == 1:
                grads[-1] = None
            advance(params, optimizer, grads, step)


def advance(
    params: Sequence[nn.Parameter], optimizer: Optimizer, grads: Sequence[Tensor | None], step: int
) -> None:
    """One step with gradients that are given, at the rate that a schedule sets."""
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone(memory_format=torch.contiguous_format)
    scale_lr(optimizer, RATES[step % len(RATES)])

    # the step may change the parameters and its own state, nothing else
    rates, theirs = _rates(optimizer), _members(optimizer)
    try:
        optimizer.step()
    except Exception as error:
        raise Broken(f"its step() without a closure fails on dense gradients: {of_users(error)}") from error
    if theirs != _members(optimizer):
        raise Broken("it puts other tensors into its groups in place of the parameters")
    if rates != _rates(optimizer):
        raise Broken("it changes the lr of its groups, which the schedule sets before every step")


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(g["lr"]) for g in optimizer.param_groups]


def _members(optimizer: Optimizer) -> list[int]:
    return [id(p) for g in optimizer.param_groups for p in g["params"]]


def keys(params: Sequence[nn.Parameter], optimizer: Optimizer) -> tuple[str, ...]:
    """Of the state of any of them."""
    return tuple(sorted({key.split("/")[0] for p in params for key in pack(optimizer, p)}))


def _unusable(optimizer: Optimizer) -> str:
    """What can be told without a step."""
    needed = [
        n for n, p in inspect.signature(optimizer.step).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]  # fmt: skip
    if needed:
        return f"its step() needs {', '.join(needed)}: a step works out loss and gradients once, before it"
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        return (
            "it requires train() and eval() calls around validation and saving, which "
            "the launcher does not make"
        )
    if any(not _number(g.get("lr")) for g in optimizer.param_groups):
        return "its groups have no number lr, which the schedule sets before every step"
    return ""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _kept(value) for key, value in group.items() if key not in OURS}


def _kept(value: Any) -> Any:
    """As it is now."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_kept(v) for v in value] if isinstance(value, list | tuple) else value


def _same(a: Any, b: Any) -> bool:
    """Of two values that were kept; of other objects than numbers, nothing is known but which they are."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, int | float | str) and a == b)
