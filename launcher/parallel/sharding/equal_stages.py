"""Compares stages that may differ in names only: the recording of one is then valid for the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from launcher.parallel.model_state.deep_copy import HOOKS
from launcher.parallel.model_state.python_state import PythonState, changed, held
from launcher.parallel.trace.specs import spec
from launcher.plan.partition.stages import covers
from launcher.plan.sharding.op_graph import OpGraph


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
    def of(cls, model: nn.Module, graph: fx.Graph, inputs: Sequence[Tensor]) -> StageCode:
        """Describe a stage of ``model`` that runs ``graph`` on ``inputs``."""
        named = [str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")]
        units = tuple(dict.fromkeys(named))
        numbers = {n: at for at, n in enumerate(graph.nodes)}
        calls = tuple(_call(n, units, numbers) for n in graph.nodes)
        things = [_at(model, unit) for unit in units]
        known: dict[int, int] = {}
        kinds = (*((spec(x), x.requires_grad) for x in inputs), *(tuple(made_of(t, known)) for t in things))
        return cls(units, calls, kinds, tuple(held(t) for t in things if isinstance(t, nn.Module)))

    def names_of(self, other: StageCode) -> dict[str, str] | None:
        """Return the unit of ``other`` for each of these; ``None`` if the two stages differ."""
        same = self.calls == other.calls and self.kinds == other.kinds
        if not same or any(changed(a, b) for a, b in zip(self.states, other.states, strict=True)):
            return None
        return dict(zip(self.units, other.units, strict=True))


def renamed(graph: OpGraph, units: Mapping[str, str]) -> OpGraph:
    """Return ``graph`` for a stage whose units have other names."""

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
    """Yield the classes and tensors that ``thing`` consists of; equal tensors have the same number."""
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
