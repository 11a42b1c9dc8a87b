"""Finds state that a module's caller sets around the call and takes back.

A module that is recomputed runs again in the backward, when its caller has put attributes and variables back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from launcher.parallel.model_state.deep_copy import HOOKS
from launcher.parallel.model_state.module_globals import files_of, functions_of, variables
from launcher.parallel.model_state.python_state import Key, PythonState, changed, same_mark, snapshot

ABSENT = object()


class _History:
    """The variables of some files, and the changes of them from one reading to the next.

    Only the last reading is kept whole: a model may have large variables, and has many modules.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._last = variables(files)
        self._replaced: list[dict[Key, Any]] = []

    def read(self) -> int:
        """Reads the variables; returns the number of this reading, which grows if they have changed."""
        now = variables(self._files)
        if keys := changed(self._last, now):
            self._replaced.append({key: self._last.marks.get(key, ABSENT) for key in keys})
            self._last = now
        return len(self._replaced)

    def changed_since(self, reading: int) -> list[Key]:
        """Returns the variables that differ from their values at ``reading``."""
        before: dict[Key, Any] = {}
        for replaced in reversed(self._replaced[reading : self.read()]):
            before |= replaced
        return [key for key, old in before.items() if not same_mark(old, self._last.marks.get(key, ABSENT))]


class StateAroundCalls:
    """The state that each module could read when it last ended: its attributes, and its files' variables.

    Only the user's code changes state around calls, so a model without any is not examined. The variables of
    files matter to modules that run code of these files.
    """

    def __init__(self, model: nn.Module) -> None:
        files = files_of(model)
        self._modules = dict(model.named_modules()) if files else {}
        self._history = _History(files) if files else None
        own = {m for m in self._modules.values() if _runs_code_of(files, m)}
        self._read_files = {name for name, m in self._modules.items() if not own.isdisjoint(m.modules())}
        self._at_end: dict[str, tuple[PythonState, int | None]] = {}

    def end(self, name: str) -> None:
        """Notes that the module ``name`` ends."""
        if name in self._modules and self._history is not None:
            reading = self._history.read() if name in self._read_files else None
            self._at_end[name] = snapshot(self._modules[name]), reading

    def settled(self) -> dict[str, str]:
        """Returns the modules for which ``set_since`` names a place when the forward ends; forgets all."""
        places = {name: self.set_since(name) for name in self._at_end}
        self._at_end.clear()
        return {name: place for name, place in places.items() if place}

    def set_since(self, name: str) -> str:
        """Returns a place whose value differs from when the module ``name`` last ended; "" for none."""
        if name not in self._at_end or self._history is None:
            return ""
        own, reading = self._at_end[name]
        for place, _ in changed(own, snapshot(self._modules[name])):
            return f"{name}.{place}".lstrip(".")
        places = [place for place, _ in self._history.changed_since(reading)] if reading is not None else []
        return places[0] if places else ""


def _runs_code_of(files: Sequence[str], module: nn.Module) -> bool:
    """Returns true if a call of this module, without its parts, runs a function of one of the files."""
    kinds = {kind.__module__ for kind in type(module).__mro__}
    functions = {f.__module__ for f in functions_of(module)}
    hooked = any(vars(module)[kind] for kind in HOOKS)
    return hooked or "forward" in vars(module) or not (kinds | functions).isdisjoint(files)
