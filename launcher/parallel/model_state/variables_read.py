"""The variables that a model and a loss read while they compute, so that code outside may set them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from launcher.parallel.model_state.library_attributes import names_read
from launcher.parallel.model_state.module_globals import files, files_of, variables_named
from launcher.parallel.model_state.python_state import PLAIN, PythonState, library
from launcher.parallel.model_state.reachable_code import reachable
from launcher.parallel.model_state.shared_state import code_of_forwards, lost
from launcher.parallel.model_state.values_used import values_used

Variables = Callable[[], Iterable[tuple[str, Any]]]
"""Yields the name and the value of each variable, as it is now."""


@dataclass(frozen=True)
class VariablesRead:
    """The variables of the user's files that a forward uses, and those that the recorded code uses.

    ``names`` has the names of variables and attributes that forwards use. ``recorded`` is the code between
    the modules of a model in several stages: it runs as it was recorded, with the values of that time.
    """

    names: frozenset[str] = frozenset()
    variables: Variables = tuple
    recorded_names: frozenset[str] = frozenset()
    recorded: Variables = tuple


def variables_of_model(model: nn.Module, called: Sequence[str] | None) -> VariablesRead:
    """Returns what the forwards of ``model`` use; ``called``: the modules around which code is recorded.

    ``None`` if no code is recorded.
    """
    own = [m for m in model.modules() if not library(type(m).__module__)]
    if not own:
        return VariablesRead()
    names, places = values_used(code_of_forwards(own)), files_of(*own)
    if called is None:
        return VariablesRead(names, variables_named(places, names))
    inside = {id(m) for name in called for m in model.get_submodule(name).modules()}
    between = values_used(code_of_forwards([m for m in own if id(m) not in inside]))
    return VariablesRead(names, variables_named(places, names), between, variables_named(places, between))


def variables_of_loss(kind: Callable[..., Any]) -> VariablesRead:
    """Returns what a loss uses; ``kind``: its class, or the function that makes it."""
    functions = [f for f in reachable([kind], library) if isinstance(f, FunctionType)]
    names = names_read(functions) & values_used(functions)
    return VariablesRead(names, variables_named(files(kind), names))


class OutsideChanges:
    """Finds which of these variables, and of the attributes of ``modules``, a block of code changes.

    ``modules``: those of this rank, also with the flags ``requires_grad`` of their parameters.
    """

    def __init__(self, reads: Sequence[VariablesRead], modules: Sequence[nn.Module]) -> None:
        self._reads = reads
        self._modules = [
            (m, {*vars(m)} & frozenset().union(*(r.names for r in reads)))
            for m in modules
            if not all(library(k.__module__) for k in type(m).__mro__[:-1])
        ]
        self._weights = [p for m in modules for p in m.parameters(recurse=False)]

    def now(self) -> tuple[PythonState, PythonState]:
        """Returns all values, and those that recorded code uses."""
        return self._state(self._all()), self._state(v for r in self._reads for v in r.recorded())

    def since(self, before: tuple[PythonState, PythonState]) -> tuple[list[str], list[str]]:
        """Returns the names of what has changed since ``now``: of all, and of what recorded code uses."""
        after = self.now()
        names = frozenset().union(*(r.names for r in self._reads)) | {"requires_grad"}
        between = frozenset().union(*(r.recorded_names for r in self._reads))
        return lost(before[0], after[0], names), lost(before[1], after[1], between)

    def _all(self) -> Iterator[tuple[str, Any]]:
        for reads in self._reads:
            yield from reads.variables()
        for module, names in self._modules:
            for name in names:
                if isinstance(value := vars(module).get(name), PLAIN):
                    yield f"{name} of {type(module).__name__}", value
        yield "requires_grad of parameters", "".join(str(int(p.requires_grad)) for p in self._weights)

    @staticmethod
    def _state(values: Iterable[tuple[str, Any]]) -> PythonState:
        out = PythonState(by_value=True, only_plain=True)
        for name, value in values:
            out.enter(name, value)
        return out
