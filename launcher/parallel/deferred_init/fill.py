"""Fills shards with initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from launcher.parallel.deferred_init import constructor
from launcher.parallel.deferred_init.replay import replay
from launcher.parallel.deferred_init.tape import Tape
from launcher.parallel.deferred_init.uninitialized import origins
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.local_tensors import cut, local
from launcher.parallel.model_state.deep_copy import hooks, keep
from launcher.parallel.stages import StagePart
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.plan import Plan
from launcher.plan.values.precision import DTYPE

FullTensorOf = Callable[[str], torch.Tensor]
"""Returns the full tensor of a first name, on the CPU."""

SOME = 1000
"""The number of leading values that identify a tensor: another place in a random stream gives others."""


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

    def one_by_one(self) -> InitialTensors:
        """Returns a source that makes one tensor at a time where the tape can, as a plan's trials do."""
        return self if self.tape.why else replace(self, build=None)

    def texts(self) -> dict[str, str]:
        """Describes how each tensor is made; processes that make it in the same way return the same text."""
        if self.tape.why:
            return {n: str(t.detach().reshape(-1)[:SOME].tolist()) for n, t in self.real.items()}
        return origins(self.names, self.tape)


def from_constructor(build: Callable[[], nn.Module], plan: Plan) -> tuple[nn.Module, InitialTensors]:
    """Returns the model on the meta device, and the source of its values.

    With deferred init, one tensor at a time is made; otherwise the full model is built once, from the seed.
    """
    dtype = dtype_of(DTYPE[plan.precision])

    def in_memory() -> dict[str, torch.Tensor]:
        with default_dtype(dtype), torch.enable_grad():
            return tensors(constructor.build_in_memory(build, plan.seed))

    with default_dtype(dtype):
        model, tape = constructor.record(build, plan.seed)
    names = {n: t.detach() for n, t in tensors(model).items()}  # one with hooks gets memory later
    return model, InitialTensors(tape, names, None if plan.deferred else in_memory)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every parameter and buffer under every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@torch.no_grad()
def fill(
    parts: list[StagePart], plan: Plan, rank: int, device: torch.device, full_tensor: FullTensorOf
) -> None:
    """Allocates this rank's pieces and fills them.

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
    """Uses one tensor, the first stage's, for an unsharded parameter of several stages of this rank."""
    named = tensors(part.module)
    for placed, name, t in part.named(plan.params):
        if placed.sharded or placed.buffer or made.setdefault(placed.name, t) is t:
            continue
        for other in (n for n in placed.names if named.get(n) is named[name]):
            owner, _, attr = other.rpartition(".")
            part.module.get_submodule(owner)._parameters[attr] = made[placed.name]  # type: ignore[assignment]


def _store(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Returns the parameters or the buffers of a module that have the tensor ``name``, and its name there."""
    owner, _, attr = name.rpartition(".")
    inner = module.get_submodule(owner)
    return inner._parameters if attr in inner._parameters else inner._buffers, attr


def _to_empty(module: nn.Module, device: torch.device) -> None:
    """Allocates memory as ``to_empty`` does, but without the user's ``_apply``.

    A loop need not call it, and it may change more than tensors: a number, or a count of its calls.
    """

    def emptied(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(t, device=device)

    for m in reversed([*module.modules()]):  # as to_empty: the inner ones first
        theirs = (k for k in type(m).__mro__ if k.__module__.partition(".")[0] == "torch")
        kind = next(k for k in theirs if "_apply" in vars(k))
        vars(kind)["_apply"](m, emptied, recurse=False)


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Allocates real memory for every tensor, only once.

    Recurrent layers keep weak references to tensors that have memory.
    """
    names: dict[int, list[str]] = {}
    for name, t in tensors(module).items():
        names.setdefault(id(t), []).append(name)
    hooked = [(p, names[id(p)]) for _, p in module.named_parameters() if hooks(p)]
    again: list[tuple[str, dict[str, Any], str]] = []
    for first, *others in names.values():
        taken = [_store(module, first)]
        for store, attr in (_store(module, other) for other in others):
            if not any(store is other and attr == name for other, name in taken):
                again.append((first, store, attr))
                taken.append((store, attr))
                store[attr] = None
    _to_empty(module, device)
    from launcher.parallel.fsdp.shard import find_parameters  # ranks only: a plan does not import FSDP2

    find_parameters(module)

    # one tensor again under all of its names
    now = tensors(module)
    for first, store, attr in again:
        store[attr] = now[first]

    # a parameter with hooks stays the same object
    for before, same in hooked:
        keep(before, module.get_parameter(same[0]))
        for name in same:
            owner, _, attr = name.rpartition(".")
            module.get_submodule(owner)._parameters[attr] = before
