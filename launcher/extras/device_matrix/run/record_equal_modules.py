"""Records equal modules and stages once."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from launcher.errors import Problem, RequestError
from launcher.extras.device_matrix.fill_in_equal_modules import filled_in
from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.run.record import record
from launcher.parallel.model_state.deep_copy import HOOKS, copied
from launcher.parallel.model_state.python_state import PythonState, changed, snapshot
from launcher.parallel.trace.tensor_specs import spec
from launcher.plan.cut.stages import covers


@dataclass(frozen=True)
class StageCode:
    """The code of a stage, for comparison.

    ``calls`` has the code between the ``units``, with these by number; ``kinds`` says what the units consist
    of.
    """

    units: tuple[str, ...]
    calls: tuple[Any, ...]
    kinds: tuple[Any, ...]
    states: tuple[PythonState, ...]

    @classmethod
    def from_graph(cls, model: nn.Module, graph: fx.Graph, inputs: Sequence[Tensor]) -> StageCode:
        """Describes a stage of ``model`` that runs ``graph`` on ``inputs``."""
        named = [str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")]
        units = tuple(dict.fromkeys(named))
        numbers = {n: at for at, n in enumerate(graph.nodes)}
        calls = tuple(_call(n, units, numbers) for n in graph.nodes)
        things = [_at(model, unit) for unit in units]
        known: dict[int, int] = {}
        kinds = (*((spec(x), x.requires_grad) for x in inputs), *(tuple(made_of(t, known)) for t in things))
        return cls(units, calls, kinds, tuple(snapshot(t) for t in things if isinstance(t, nn.Module)))

    def names_of(self, other: StageCode) -> dict[str, str] | None:
        """Returns the unit of ``other`` for each of these; ``None`` if the two stages differ."""
        same = self.calls == other.calls and self.kinds == other.kinds
        if not same or any(changed(a, b) for a, b in zip(self.states, other.states, strict=True)):
            return None
        return dict(zip(self.units, other.units, strict=True))


def renamed(graph: OpGraph, units: Mapping[str, str]) -> OpGraph:
    """Returns ``graph`` for a stage whose units have other names."""

    def other(name: str) -> str:
        unit = next((u for u in units if covers(u, name)), None)
        return name if unit is None else units[unit] + name[len(unit) :]

    return replace(
        graph,
        params=tuple((other(name), v) for name, v in graph.params),
        nodes=tuple(replace(n, module=other(n.module)) for n in graph.nodes),
        buffers=frozenset(map(other, graph.buffers)),
        changes=tuple((other(name), v) for name, v in graph.changes),
    )


def _at(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _call(node: fx.Node, units: tuple[str, ...], numbers: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    def numbered(args: Any) -> Any:
        return fx.node.map_arg(args, lambda n: f"value {numbers[n]}")

    named = node.op in ("call_module", "get_attr")
    target = units.index(str(node.target)) if named else "" if node.op == "placeholder" else node.target
    return node.op, target, numbered(node.args), numbered(node.kwargs)


def made_of(thing: Any, known: dict[int, int]) -> Iterator[Any]:
    """Yields the classes and tensors that ``thing`` consists of; equal tensors have the same number."""
    if isinstance(thing, Tensor):
        yield _tensor(thing, known)
        return
    for path, module in thing.named_modules(remove_duplicate=False):
        hooks = tuple(tuple(vars(module)[kind].values()) for kind in HOOKS)
        yield path, type(module), module.training, hooks
        for tensors in (module._parameters, module._buffers):
            yield from ((name, None if t is None else _tensor(t, known)) for name, t in tensors.items())


def _tensor(t: torch.Tensor, known: dict[int, int]) -> tuple[Any, ...]:
    return spec(t), t.requires_grad, known.setdefault(id(t), len(known))


LEAST = 4
"""Number of equal modules from which this pays."""


def record_ours(module: nn.Module, inputs: Sequence[Tensor]) -> OpGraph:
    """Records a model of this package, as ``record`` does, in which equal modules run equal operators."""
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
        except RequestError:  # their outputs differ from their inputs in shape; other errors come again below
            filled = None
        if filled is not None:
            return filled
    return record(module, inputs, ours=True)


class _LeftOut(nn.Module):
    """Replaces a module whose output has the shape of its input."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if more:  # ``record_ours`` catches this, and records the full module
            raise RequestError((Problem("model", "a module takes more than one tensor"),))
        return torch.clone(x)


def equal_modules(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields modules that take one tensor, each with an equal module below the same parent.

    The first module of a group equals none here, as its input may have no gradient. No module is below
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
    """Yields the names of equal children, without the first child, which is recorded by itself."""
    remaining = [(n, m) for n, m in owner._modules.items() if m is not None and _alone(m, shared)]
    while len(remaining) >= LEAST:
        (_, first), *_ = remaining
        mine, state = list(made_of(first, {})), snapshot(first)
        same = [n for n, m in remaining if list(made_of(m, {})) == mine and not changed(state, snapshot(m))]
        if len(same) >= LEAST:
            yield same[1:]
        remaining = [(n, m) for n, m in remaining if n not in same]


def _alone(module: nn.Module, shared: Counter[int]) -> bool:
    """Returns true if a module takes one tensor, has no buffers, and shares no parameter with another."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    takes = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    own = list(module.parameters())
    if len(takes) != 2 or not own or any(True for _ in module.buffers()):
        return False
    return all(shared[id(t)] == 1 for t in own)
