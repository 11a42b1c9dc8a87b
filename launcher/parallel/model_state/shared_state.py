"""Values that a stage's forward changes late, and that modules of other stages read.

The plan refuses a model whose forwards change such a value. It tries a few forwards, so it misses a change at
a later one: a flag in a global dictionary, a text or a tensor in an object that several modules have. Each
stage has its own process, and so its own copy of the value: the change would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import nn

from launcher.parallel.model_state.deep_copy import TORCH_ATTRIBUTES
from launcher.parallel.model_state.library_attributes import names_read
from launcher.parallel.model_state.module_globals import files_of, variables_named
from launcher.parallel.model_state.python_state import (
    BY_IDENTITY,
    PLAIN,
    PythonState,
    TensorMark,
    changed,
    library,
    new_values,
)
from launcher.parallel.model_state.reachable_code import reachable
from launcher.parallel.model_state.values_used import values_used

NOTHING = object()
ATTRIBUTES = re.compile(r"\.(\w+)(?!\w*\()")
"""The names of attributes in a path such as ``.steps[0].count``, without ``.get()`` of context variables."""


@dataclass
class StepsOfSharedState:
    """The places that a rank's stages and other stages have in common, and their values before a step.

    ``variables`` yields those in the files of the model's code, and ``objects`` has those in attributes.
    ``read`` has the names that forwards of the other stages read. ``before`` is ``None`` in a step that is
    not compared.
    """

    variables: Callable[[], Iterable[tuple[str, Any]]]
    objects: Callable[[], Iterable[tuple[str, Any]]]
    read: frozenset[str]
    before: PythonState | None = None
    started: bool = False

    def begin(self) -> None:
        """Notes the values before a step. The first one is compared only from its first forwards on."""
        if self.started:
            self.before = self._values()
        self.started = True

    def first_forward(self) -> None:
        """Notes the values after the first forward of a stage, which may fill caches."""
        self.before = self._values()

    def lost(self) -> list[str]:
        """Returns the places whose values the step has changed: numbers, texts, sets of them, and tensors."""
        return [] if self.before is None else lost(self.before, self._values(), self.read)

    def _values(self) -> PythonState:
        out = PythonState(by_value=True, only_plain=True)
        for name, value in (*self.variables(), *self.objects()):
            out.enter(name, value)
        return out


def lost(before: PythonState, after: PythonState, read: frozenset[str]) -> list[str]:
    """Returns the places whose values differ, if the names of all attributes on the way are read.

    Plain values and tensors are compared; a tensor that requires a gradient is a weight or a result.
    """
    places = dict.fromkeys(
        name
        for name, path in changed(before, after)
        if _differs(before.marks.get((name, path), NOTHING), after.marks.get((name, path), NOTHING))
        and read.issuperset(ATTRIBUTES.findall(path))
    )
    return [*places]


def _differs(before: Any, after: Any) -> bool:
    """Returns true if two unequal marks are those of plain values, or of tensors with other values."""
    if isinstance(before, TensorMark) and isinstance(after, TensorMark):
        return new_values(before, after)
    return _plain(before) and _plain(after)


def _plain(mark: Any) -> bool:
    return mark is NOTHING or isinstance(mark, PLAIN) or (isinstance(mark, tuple) and set in mark[:1])


def steps_of_shared_state(
    model: nn.Module, stages: Sequence[nn.Module], hooks: bool
) -> StepsOfSharedState | None:
    """Returns the state that modules in ``stages`` share with all others of ``model``; ``None`` without any.

    Only the user's code changes such state, so modules of libraries are not examined. ``hooks``: the stages
    may have a hook until their first forward ends; otherwise the first step is not compared.
    """
    own = {id(m) for stage in stages for m in stage.modules()}
    others = [m for m in model.modules() if id(m) not in own and not library(type(m).__module__)]
    ours = [m for m in model.modules() if id(m) in own and not library(type(m).__module__)]
    if not others or not ours:
        return None

    # variables that forwards of other stages use, and objects to which attributes on both sides lead
    read = names_read(code_of_forwards(others)) & names_used(model)
    variables = variables_named(files_of(*ours), read)
    theirs = _objects(others, read)
    common = [(m, name) for key, (m, name) in _objects(ours, None).items() if key in theirs]

    def objects() -> Iterator[tuple[str, Any]]:
        for module, name in common:
            yield f"{name} of {type(module).__name__}", getattr(module, name, None)

    out = StepsOfSharedState(variables, objects, read)
    for stage in stages if hooks else ():
        _once(stage, out.first_forward)
    return out


def names_used(model: nn.Module) -> frozenset[str]:
    """Returns the names of variables and attributes whose values forwards of the user's modules use.

    Names that their code only stores in, or prints, are left out.
    """
    return values_used(code_of_forwards([m for m in model.modules() if not library(type(m).__module__)]))


def code_of_forwards(modules: Sequence[nn.Module]) -> list[FunctionType]:
    """Returns the functions that forwards of ``modules`` run, and those that make their extra state.

    These are ``forward``, the forward hooks, and all that their code refers to by a name of a function,
    method or attribute. A hook of the backward is not included, if no forward names it.
    """
    kinds = {k for m in modules for k in type(m).__mro__ if not library(k.__module__)}
    hooks = [f for m in modules for f in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    names, before = frozenset({"forward", "get_extra_state", "__call__", "__getattr__"}), frozenset[str]()
    out: list[FunctionType] = []
    while names != before:
        before = names
        starts: list[Any] = [*hooks]
        for owner in (*kinds, *modules):
            inside = [v for name, v in vars(owner).items() if name in names and name not in TORCH_ATTRIBUTES]
            starts += (v.func if isinstance(v, cached_property) else v for v in inside)
        out = [f for f in reachable(starts, library, _runs_elsewhere) if isinstance(f, FunctionType)]
        names |= names_read(out)
    return out


def _runs_elsewhere(value: Any) -> bool:
    """Returns true for code of other modules, which they run themselves, and for what no forward runs."""
    if isinstance(value, FunctionType):
        return value.__name__ == "backward"
    return isinstance(value, type) and issubclass(value, nn.Module)


def _once(stage: nn.Module, call: Callable[[], None]) -> None:
    """Calls ``call`` when the first forward of ``stage`` ends."""

    def hook(*_: object) -> None:
        handle.remove()
        call()

    handle = stage.register_forward_hook(hook)


def _objects(modules: Iterable[nn.Module], read: frozenset[str] | None) -> dict[int, tuple[nn.Module, str]]:
    """Returns, by id, the objects in attributes that can change in place: the first module and attribute.

    ``read``: only those in attributes of these names.
    """
    out: dict[int, tuple[nn.Module, str]] = {}
    for module in modules:
        for name, value in _attributes(module, read):
            out.setdefault(id(value), (module, name))
    return out


def _attributes(module: nn.Module, read: frozenset[str] | None) -> Iterator[tuple[str, Any]]:
    for name, value in (*vars(module).items(), *module._buffers.items()):
        if read is not None and name not in read:
            continue
        single = isinstance(value, (*PLAIN, *BY_IDENTITY)) and not isinstance(value, torch.Tensor)
        if name not in TORCH_ATTRIBUTES and not single:
            yield name, value
