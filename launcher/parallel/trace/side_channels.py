"""Refuses code between the named modules that passes them anything but arguments: no stage runs that code."""

from __future__ import annotations

from collections.abc import Mapping
from types import GeneratorType

from torch import nn

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.deep_copy import HOOKS
from launcher.parallel.model_state.module_globals import files, variables
from launcher.parallel.model_state.python_state import PythonState, changed, held, library
from launcher.plan.partition.stages import covers


class SideChannels:
    """Of one forward: what a leaf can see in Python, its arguments excepted, is as leaves have left it."""

    def __init__(self, model: nn.Module, leaves: Mapping[str, nn.Module]) -> None:
        for name, leaf in leaves.items():
            _movable(name, leaf)
        self.leaves = leaves
        self.files = files(*map(type, model.modules()))
        self.own = {name: _own(leaf) for name, leaf in leaves.items()}
        self.holders: dict[int, list[str]] = {}
        for name, state in self.own.items():
            for some in state.also:
                self.holders.setdefault(some, []).append(name)
        self.around = variables(self.files)

    def begin(self, name: str) -> str:
        """Leaf ``name`` is about to run. What was changed since leaves ran, or ""."""
        return self._told(name) or self._set()

    def end(self, name: str) -> None:
        """It has run, and may have changed what others hold too."""
        others = [m for m in self.leaves if covers(name, m) or covers(m, name)]
        for other in {*others}.union(*(self.holders.get(some, ()) for some in self.own[name].also)):
            self.own[other] = _own(self.leaves[other])
        self.around = variables(self.files)

    def over(self) -> tuple[str, str]:
        """The forward is done. What was changed after a leaf had run, and that leaf."""
        last = self._set()
        for name in self.leaves:
            at = last or self._told(name)
            if at:
                return at, name
        return "", ""

    def _told(self, name: str) -> str:
        """An attribute of the leaf ``name`` that is not as leaves have left it."""
        return next((_below(name, at) for at, _ in changed(self.own[name], _own(self.leaves[name]))), "")

    def _set(self) -> str:
        """Such a variable."""
        return next((at for at, _ in changed(self.around, variables(self.files))), "")


HOOKED = "the hooks of"


def _own(leaf: nn.Module) -> PythonState:
    """What its modules keep in Python, and their hooks, those of libraries excepted, which only look."""
    out = held(leaf)
    for path, module in leaf.named_modules():
        each = [f for kind in HOOKS for f in vars(module)[kind].values()]
        users = [f for f in each if not library(getattr(f, "__module__", None) or "torch")]
        out.enter(f"{HOOKED} {path}", users)
    return out


def _below(leaf: str, at: str) -> str:
    """What the model calls ``at``, which ``leaf`` calls so."""
    if at.startswith(HOOKED):
        return f"{HOOKED} {leaf}.{at.removeprefix(HOOKED + ' ')}".strip(".")
    return f"{leaf}.{at}"


def _movable(leaf: str, model: nn.Module) -> None:
    """Refuse what a copy of the model, which the plan runs, has in common with it, and moves on."""
    for path, module in model.named_modules(prefix=leaf):
        for name, value in vars(module).items():
            if isinstance(value, GeneratorType) and value.gi_frame is not None:
                at = f"{path}.{name}".lstrip(".")
                text = f"{at} is a generator, which cannot be copied: the plan would move it on"
                cure = "make it in the forward, or let it be an iterator of itertools"
                raise RequestError((Problem("model", f"{text}; {cure}"),))
