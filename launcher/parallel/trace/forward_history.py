"""Runs forwards of a model one after the other, and records the Python state that passes between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from launcher.parallel.dispatch.modes import tree_leaves
from launcher.parallel.model_state.python_state import Key, PythonState, changed, snapshot
from launcher.parallel.trace.tensor_side_effects import StateEffects

aten = torch.ops.aten
READ = aten._local_scalar_dense.default
"""The operation by which Python reads a number: bool(), float(), int() and item() of a tensor."""

ONLY_SHAPE = frozenset({
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    "ones_like", "zeros_like",
})  # fmt: skip
"""Operations that use the shape and dtype of their first argument, and not its values."""

OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
"""Operations that do not use the old values of the tensor that they write to, their first argument."""

READS_IN_TURN = 8
"""How many reads of numbers are changed one by one."""

LARGE = 1e6
"""The factor by which another float differs."""

Change = Callable[[int, Any], Any]
"""Returns what Python reads instead of a number, by how many were read before it."""


class EarlierTensors(StateEffects):
    """Records, while entered, which tensors that earlier forwards left in Python state are used again.

    ``used`` has their attributes, and whether they depend on the inputs or on random numbers. ``numbers`` is
    how often Python has read a number that does. If ``change`` is set, it gets another number.
    Parameters and buffers do not count: other checks follow them.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor], change: Change | None = None) -> None:
        super().__init__(model, inputs, lambda: "")
        self.used: dict[str, bool] = {}
        self.numbers = 0
        self._change = change
        self._left: dict[int, list[str]] = {}
        self._alive: list[Tensor] = []  # the memory of a freed tensor could be reused
        self._own = {self.memory(t) for t in (*model.parameters(), *model.buffers())}
        self._before: set[int] = set()

    def start(self, state: PythonState) -> None:
        """Notes the tensors before the first forward, equal on all ranks until something writes them."""
        strided = (t for t in state.tensors.values() if t.layout is torch.strided)
        self._before |= {self.memory(t) for t in strided}
        self._alive += state.tensors.values()

    def end(self, state: PythonState) -> None:
        """Notes the tensors that a forward has left behind."""
        self._left = {}
        for (name, _), t in state.tensors.items():
            if t.layout is not torch.strided:
                continue
            memory = self.memory(t)
            if memory not in self._own and (memory not in self._before or self._writes[memory]):
                self._left.setdefault(memory, []).append(name)
        self._alive += state.tensors.values()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = func._schema.name.removeprefix("aten::")
        values = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for t in values[1:] if kind in OVERWRITES else () if kind in ONLY_SHAPE else values:
            for name in self._left.get(self.memory(t), ()) if t.layout is torch.strided else ():
                self.used[name] = self.used.get(name, False) or self.by_data(t)
        if kind in ONLY_SHAPE:
            return func(*args, **kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is READ and self.by_data(args[0]):
            self.numbers += 1
            out = out if self._change is None else self._change(self.numbers - 1, out)
        return out


@dataclass(frozen=True)
class History:
    """The state that consecutive forwards of ``model`` left behind.

    ``states`` has the state before the first forward and after each, and ``contents`` the same by its
    contents. ``out`` is the output of the last forward. ``seen`` is ``None`` if they were not watched.
    """

    model: nn.Module
    states: list[PythonState]
    contents: list[PythonState]
    out: list[Any]
    seen: EarlierTensors | None

    def moved(self, first: int, last: int) -> set[Key]:
        """Returns the places that differ between the states number ``first`` and ``last``."""
        both = self.states, self.contents
        return {key for states in both for key in changed(states[first], states[last])}

    def tensors(self) -> set[Key]:
        """Returns the places that have had a tensor."""
        return {key for state in self.states for key in state.tensors}


def run_history(
    model: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    forward: Callable[[nn.Module, Sequence[Tensor]], Any],
    watched: bool = True,
    change: Change | None = None,
) -> History:
    """Returns the history of a forward of ``model``, which is changed, for each of the ``batches``."""
    seen = EarlierTensors(model, [t for batch in batches for t in batch], change) if watched else None
    states, contents = [snapshot(model)], [snapshot(model, by_contents=True)]
    if seen is not None:
        seen.start(states[0])
    out: Any = ()
    for batch in batches:
        with seen or nullcontext():
            out = forward(model, batch)
        states.append(snapshot(model))
        contents.append(snapshot(model, by_contents=True))
        if seen is not None:
            seen.end(states[-1])
    return History(model, states, contents, tree_leaves(out), seen)


def other_reads(count: int) -> Iterator[Change]:
    """Yields ways to change the numbers that Python reads, of which a forward reads ``count``.

    At first all of them are changed, and then each of the first ones alone. Further numbers, which a loop may
    read because of the change, stay as they are, so that it ends.
    """
    every = range(count)
    for chosen, factor in ((every, LARGE), (every, 1 / LARGE), (every, -1.0)):
        yield partial(_changed_read, chosen, factor)
    for one in every[:READS_IN_TURN]:
        yield partial(_changed_read, range(one, one + 1), LARGE)


def _changed_read(chosen: range, factor: float, at: int, value: Any) -> Any:
    """Returns another number of the same type, for a read ``at`` one of the ``chosen`` positions.

    That is the other truth value, the next integer, or a multiple.
    """
    if at not in chosen:
        return value
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * factor
