"""Compares what is replayed of a constructor with what a plain construction makes of the same draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from launcher.parallel.deferred_init.operation_tape import Tape
from launcher.parallel.deferred_init.record import build_with_draws
from launcher.parallel.deferred_init.replay import replay

SMALL = 1 << 20
"""Numbers of a model that is compared whenever it is planned; a larger one is compared by ``certify``."""
ROUNDINGS = 64
"""Kernels for other strides add up in another order."""

Build = Callable[[], nn.Module]


def differing(build: Build, model: nn.Module, tape: Tape) -> str:
    """Why a small ``model``, which ``record`` made, is not built from its tape; "" where it can be."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if tape.why or sum(t.numel() for t in named.values()) > SMALL:
        return ""
    plain = plain_tensors(build, tape.seed)
    made = ((n, replay(tape.log, t, n, tape.seed)) for n, t in named.items() if n in plain)
    for name in unlike(made, plain):
        return f"makes other numbers of {name} when it is replayed"
    return ""


def plain_tensors(build: Build, seed: int) -> dict[str, Tensor]:
    """Every tensor of a plain construction, by first name, without those that are on the meta device."""
    model = build_with_draws(build, seed)
    named = (*model.named_parameters(), *model.named_buffers())
    return {n: t for n, t in named if not t.is_meta}


def unlike(made: Iterator[tuple[str, Tensor]], plain: Mapping[str, Tensor]) -> Iterator[str]:
    """The names of tensors that are not those of ``plain``, up to roundings."""
    for name, t in made:
        if not same(t, plain[name]):
            yield name


@torch.no_grad()
def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same numbers, up to a few roundings of the largest."""
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
