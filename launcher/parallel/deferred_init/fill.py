"""Fills shards with initial values, and compares samples with a plain construction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from launcher.parallel.deferred_init import record
from launcher.parallel.deferred_init.record import build_with_draws
from launcher.parallel.deferred_init.replay import replay
from launcher.parallel.deferred_init.tape import Tape
from launcher.parallel.deferred_init.uninitialized import origins
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.mesh import cut, local
from launcher.parallel.model_state.deep_copy import hooks, keep
from launcher.parallel.stages import StagePart
from launcher.parallel.trace.model_facts import dtype_of
from launcher.plan.plan import Plan
from launcher.plan.values.dtypes import DTYPE

FullTensorOf = Callable[[str], torch.Tensor]
"""Returns the full tensor of a first name, on the CPU."""

SOME = 1000
"""Leading values of a tensor that identify it: another place in a random stream gives others."""


@dataclass(frozen=True)
class InitialTensors:
    """The source of a model's values: ``tape`` makes one tensor at a time, ``real`` has all at once.

    ``names`` has the tensors on the meta device; ``build`` makes the ``real`` ones on first use.
    """

    tape: Tape
    names: Mapping[str, torch.Tensor]
    build: Callable[[], Mapping[str, torch.Tensor]] | None = None

    @cached_property
    def real(self) -> Mapping[str, torch.Tensor]:
        return self.build() if self.build is not None else {}

    def __call__(self, name: str) -> torch.Tensor:
        if self.real:
            return self.real[name].detach()
        return replay(self.tape.log, self.names[name], name, self.tape.seed)

    def texts(self) -> dict[str, str]:
        """Describe how each tensor is made; processes that do the same return the same words."""
        if self.tape.why:
            return {n: str(t.detach().reshape(-1)[:SOME].tolist()) for n, t in self.real.items()}
        return origins(self.names, self.tape)


def from_constructor(build: Callable[[], nn.Module], plan: Plan) -> tuple[nn.Module, InitialTensors]:
    """Return the model on the meta device, and the source of its values.

    With deferred init, one tensor at a time is made; otherwise the full model is built once, from the seed.
    """
    dtype = dtype_of(DTYPE[plan.precision])

    def in_memory() -> dict[str, torch.Tensor]:
        with default_dtype(dtype), torch.enable_grad():
            return tensors(record.build_in_memory(build, plan.seed))

    with default_dtype(dtype):
        model, tape = record.record(build, plan.seed)
    names = {n: t.detach() for n, t in tensors(model).items()}  # one with hooks gets its memory itself
    return model, InitialTensors(tape, names, None if plan.deferred else in_memory)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer under every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@torch.no_grad()
def fill(
    parts: list[StagePart], plan: Plan, rank: int, device: torch.device, full_tensor: FullTensorOf
) -> None:
    """Allocate this rank's pieces and fill them.

    A full tensor exists in memory only while it is made.
    """
    made: dict[str, torch.Tensor] = {}
    kept = {n for p in plan.params for n in p.names if p.buffer}
    for part in parts:
        _allocate(part.module, device)
        _share(part, plan, made)

        # tensors that the plan lays out: this rank's box of each
        for placed, _, t in part.named(plan.params):
            box = placed.layout.box(rank)
            assert box is not None
            local(t).copy_(cut(full_tensor(placed.name), box))

        # other buffers are full on every rank
        for name, b in part.module.named_buffers(remove_duplicate=False):
            if name not in kept:
                b.copy_(full_tensor(name))


def _share(part: StagePart, plan: Plan, made: dict[str, torch.Tensor]) -> None:
    """Make an unsharded parameter of several stages of this rank one tensor, that of the first stage."""
    named = tensors(part.module)
    for placed, name, t in part.named(plan.params):
        if placed.sharded or placed.buffer or made.setdefault(placed.name, t) is t:
            continue
        for other in (n for n in placed.names if named.get(n) is named[name]):
            owner, _, attr = other.rpartition(".")
            part.module.get_submodule(owner)._parameters[attr] = made[placed.name]  # type: ignore[assignment]


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate real memory for every tensor.

    ``to_empty`` alone would make two of a tensor that has two names.
    """
    names: dict[int, list[str]] = {}
    for name, t in tensors(module).items():
        names.setdefault(id(t), []).append(name)
    hooked = [(p, names[id(p)]) for _, p in module.named_parameters() if hooks(p)]
    module.to_empty(device=device)

    # one tensor again under all of its names
    for first, *others in names.values():
        for other in others:
            owner, _, attr = other.rpartition(".")
            inner = module.get_submodule(owner)
            home: dict[str, Any] = inner._parameters if attr in inner._parameters else inner._buffers
            home[attr] = tensors(module)[first]

    # a parameter with hooks stays the same object
    for before, same in hooked:
        keep(before, module.get_parameter(same[0]))
        for name in same:
            owner, _, attr = name.rpartition(".")
            module.get_submodule(owner)._parameters[attr] = before


SMALL = 1 << 20
"""Most elements of a model to compare on every plan; ``certify`` compares larger ones."""
ROUNDINGS = 64
"""Tolerance in roundings: kernels for other strides add up in another order."""

Build = Callable[[], nn.Module]


def differing(build: Build, model: nn.Module, tape: Tape) -> str:
    """Return why a small ``model`` of ``record`` cannot be built from its tape, or "" if it can."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if tape.why or sum(t.numel() for t in named.values()) > SMALL:
        return ""
    plain = plain_tensors(build, tape.seed)
    made = ((n, replay(tape.log, t, n, tape.seed)) for n, t in named.items() if n in plain)
    for name in unlike(made, plain):
        return f"gives {name} other values when it is replayed"
    return ""


def plain_tensors(build: Build, seed: int) -> dict[str, Tensor]:
    """Return every tensor of a plain construction, by first name, except those on the meta device."""
    model = build_with_draws(build, seed)
    named = (*model.named_parameters(), *model.named_buffers())
    return {n: t for n, t in named if not t.is_meta}


def unlike(made: Iterator[tuple[str, Tensor]], plain: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of tensors that differ from those of ``plain`` by more than rounding."""
    for name, t in made:
        if not same(t, plain[name]):
            yield name


@torch.no_grad()
def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values, up to ``ROUNDINGS`` roundings of the largest."""
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
