"""Records two of several modules of a stage that are equal but for names, and uses one for all others."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.python_state import changed, held
from launcher.parallel.sharding.equal_stages import made_of
from launcher.parallel.sharding.record import record
from launcher.plan.sharding.op_graph import OpGraph
from launcher.plan.sharding.repeated_modules import filled_in

LEAST = 4
"""Number of equal modules from which this pays."""


def record_ours(module: nn.Module, inputs: Sequence[Tensor]) -> OpGraph:
    """Record a model of this package, as ``record`` does, in which equal modules run equal operators."""
    likes = dict(equal_modules(module))
    if likes:
        short = copied(module)
        for path in likes:
            owner, _, name = path.rpartition(".")
            short.get_submodule(owner).register_module(name, _LeftOut())
        try:
            filled = filled_in(
                record(short, inputs, ours=True), likes, [n for n, _ in module.named_parameters()]
            )
        except RequestError:  # they make tensors of other shapes; any other error is found again below
            filled = None
        if filled is not None:
            return filled
    return record(module, inputs, ours=True)


class _LeftOut(nn.Module):
    """Stands for a module that makes a tensor like its input."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if more:
            raise RequestError((Problem("model", "a module takes more than one tensor"),))
        return torch.clone(x)


def equal_modules(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield modules that take one tensor, each with an equal module below the same parent.

    The first module of a group stands for none, as its input may have no gradient. No module is below
    another.
    """
    shared = Counter(id(t) for _, t in module.named_parameters(remove_duplicate=False))
    done: list[str] = []
    for path, owner in module.named_modules():
        if any(f"{path}.".startswith(f"{name}.") for name in done):
            continue
        for like, *others in _groups(owner, shared):
            prefix = f"{path}." if path else ""
            done += [prefix + name for name in (like, *others)]
            yield from ((prefix + name, prefix + like) for name in others)


def _groups(owner: nn.Module, shared: Counter[int]) -> Iterator[list[str]]:
    """Yield the names of equal children, without the first child, which is recorded by itself."""
    left = [(n, m) for n, m in owner._modules.items() if m is not None and _alone(m, shared)]
    while len(left) >= LEAST:
        (_, first), *_ = left
        mine, state = list(made_of(first, {})), held(first)
        same = [n for n, m in left if list(made_of(m, {})) == mine and not changed(state, held(m))]
        if len(same) >= LEAST:
            yield same[1:]
        left = [(n, m) for n, m in left if n not in same]


def _alone(module: nn.Module, shared: Counter[int]) -> bool:
    """Whether a module takes one tensor, has no buffers, and shares its parameters with no other module."""
    found = inspect.signature(type(module).forward).parameters.values()
    takes = [p.name for p in found if p.kind is not p.VAR_POSITIONAL]
    own = list(module.parameters())
    if len(takes) != 2 or not own or any(True for _ in module.buffers()):
        return False
    return all(shared[id(t)] == 1 for t in own)
