"""Compares a model that is built from its recorded constructor with one that is built plainly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from launcher.parallel.deferred_init.constructor import build_with_draws
from launcher.parallel.deferred_init.replay import replay
from launcher.parallel.deferred_init.tape import Tape

SMALL = 1 << 20
"""The most elements of a model that every plan compares; ``certify`` compares larger models."""
ROUNDINGS = 64
"""Tolerance in roundings: kernels for other strides add up in another order."""
Build = Callable[[], nn.Module]


def differing(build: Build, model: nn.Module, tape: Tape) -> str:
    """Returns why a small ``model`` of ``record`` cannot be built from its tape, or "" if it can."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if tape.why or sum(t.numel() for t in named.values()) > SMALL:
        return ""
    plain = plain_tensors(build, tape.seed)
    made = ((n, replay(tape.log, t, n, tape.seed)) for n, t in named.items() if n in plain)
    for name in unlike(made, plain):
        return f"gives {name} other values when it is replayed"
    return ""


def plain_tensors(build: Build, seed: int) -> dict[str, Tensor]:
    """Returns every tensor of a plain construction, by first name, except those on the meta device."""
    model = build_with_draws(build, seed)
    named = (*model.named_parameters(), *model.named_buffers())
    return {n: t for n, t in named if not t.is_meta}


def unlike(made: Iterator[tuple[str, Tensor]], plain: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields the names of tensors that differ from those of ``plain`` by more than rounding."""
    for name, t in made:
        if not same(t, plain[name]):
            yield name


@torch.no_grad()
def same(a: Tensor, b: Tensor) -> bool:
    """Returns true if two tensors have the same values, up to ``ROUNDINGS`` roundings of the largest."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (b.is_floating_point() or b.is_complex()):
        return torch.equal(a, b)
    eps = torch.finfo(b.dtype).eps
    a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a, b))
    a, b = a.double(), b.double()
    finite = b[b.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=ROUNDINGS * eps * largest, equal_nan=True)
