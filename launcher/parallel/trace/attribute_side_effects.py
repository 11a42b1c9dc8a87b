"""Finds values that modules pass each other in attributes or other Python state, which stages would lose."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import GeneratorType
from typing import Any

from torch import nn

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.deep_copy import HOOKS, TORCH_ATTRIBUTES
from launcher.parallel.model_state.module_globals import files_of, variables
from launcher.parallel.model_state.python_state import Key, PythonState, changed, library, same_mark, snapshot
from launcher.plan.cut.stages import covers


class SideChannels:
    """Checks in one forward that only leaves change the Python state that leaves can see.

    What a leaf leaves behind, another leaf may read. State that stays changed shows after the forward, and
    other checks refuse it if it matters. ``taken`` has state that is as before at the end of the forward.

    A module that several leaves contain, such as a rotary embedding, has a copy on each of their stages.
    ``shared_changes`` has its attributes that a leaf has changed, each with that leaf and the new value. A
    cache that each copy fills with the same numbers is no problem.
    """

    def __init__(self, model: nn.Module, leaves: Mapping[str, nn.Module]) -> None:
        for name, leaf in leaves.items():
            _movable(name, leaf)
        self.leaves = leaves
        self.files = files_of(model)
        self.shared = _shared(model, leaves)
        self.shared_changes: dict[str, tuple[str, Any]] = {}
        common = {id(module) for module in self.shared.values()}
        self.parts = {
            name: [path for path, module in self.shared.items() if module in {*leaf.modules()}]
            for name, leaf in leaves.items()
        }
        self.own = {name: _own(leaf, common) for name, leaf in leaves.items()}
        self.common = {path: _own_alone(module) for path, module in self.shared.items()}
        self.holders: dict[int, list[str]] = {}
        for name, state in self.own.items():
            for some in state.also:
                self.holders.setdefault(some, []).append(name)
        self.around = variables(self.files)
        self.between = {p: m for p, m in model.named_modules() if not any(covers(n, p) for n in leaves)}
        self.outer = self._outer()
        self.left: dict[tuple[str, Key], tuple[str, Any]] = {}

    def begin(self, name: str) -> str:
        """Returns, before leaf ``name`` runs, state that code outside of leaves has changed, or ""."""
        self.outer = self._outer()
        return self._changed_attribute(name) or self._changed_variable()

    def end(self, name: str) -> None:
        """Records the state after leaf ``name``, which may have changed objects of other leaves too."""
        others = [m for m in self.leaves if covers(name, m) or covers(m, name)]
        for other in {*others}.union(*(self.holders.get(some, ()) for some in self.own[name].also)):
            before, self.own[other] = self.own[other], self._of(other)
            if other not in others:
                self._leave(name, other, before, self.own[other])
        for path in self.parts[name]:
            before, after = self.common[path], _own_alone(self.shared[path])
            self.common[path] = after
            self._leave(name, IN + path, before, after)
            for key in changed(before, after):
                self.shared_changes[_below(path, "".join(key))] = name, after.marks.get(key)
        before, self.around = self.around, variables(self.files)
        self._leave(name, "", before, self.around)
        self._leave(name, OUTER, self.outer, self._outer())

    def _leave(self, leaf: str, owner: str, before: PythonState, after: PythonState) -> None:
        """Records what ``leaf`` has changed, with the value that it had before the first change."""
        for key in changed(before, after):
            self.left.setdefault((owner, key), (leaf, before.marks.get(key, ABSENT)))

    def taken(self) -> tuple[str, str]:
        """Returns, at the end of the forward, a place that a leaf changed, now as before, and the leaf."""
        now = {**self.own, "": self.around, OUTER: self._outer()}
        now |= {IN + path: state for path, state in self.common.items()}
        for (owner, key), (leaf, before) in self.left.items():
            if same_mark(before, now[owner].marks.get(key, ABSENT)):
                return (key[0] if owner in ("", OUTER) else _below(owner.removeprefix(IN), key[0])), leaf
        return "", ""

    def over(self) -> tuple[str, str]:
        """Returns, after the forward, state that was changed after a leaf had run, and that leaf."""
        last = self._changed_variable()
        for name in self.leaves:
            at = last or self._changed_attribute(name)
            if at:
                return at, name
        return "", ""

    def _changed_attribute(self, name: str) -> str:
        """Returns an attribute of leaf ``name`` that code outside of leaves has changed, or ""."""
        states = [(name, self.own[name], self._of(name))]
        states += [(path, self.common[path], _own_alone(self.shared[path])) for path in self.parts[name]]
        return next((_below(owner, at) for owner, a, b in states for at, _ in changed(a, b)), "")

    def _of(self, name: str) -> PythonState:
        """Returns the state of leaf ``name``, without modules that other leaves contain too."""
        return _own(self.leaves[name], {*map(id, self.shared.values())})

    def _changed_variable(self) -> str:
        """Returns a variable that code outside of leaves has changed, or ""."""
        return next((at for at, _ in changed(self.around, variables(self.files))), "")

    def _outer(self) -> PythonState:
        """Returns the attributes of the modules that contain leaves."""
        out = PythonState()
        for path, module in self.between.items():
            for name, value in vars(module).items():
                if name not in TORCH_ATTRIBUTES:
                    out.enter(f"{path}.{name}".lstrip("."), value)
        return out


ABSENT, OUTER = object(), "the modules around the leaves"
IN = "the shared module "
HOOKED = "the hooks of"


def _shared(model: nn.Module, leaves: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Returns, by its first name, each module that several leaves contain, nested leaves aside."""
    first: dict[nn.Module, str] = {}
    out: dict[str, nn.Module] = {}
    for name, leaf in model.named_modules():
        if name not in leaves or any(covers(other, name) for other in leaves if other != name):
            continue
        for path, module in leaf.named_modules(prefix=name):
            if module in first:
                out[first[module]] = module
            first.setdefault(module, path)
    return out


def _own(leaf: nn.Module, without: Collection[int] = ()) -> PythonState:
    """Returns the Python state of a leaf's modules and hooks, without library hooks, which only observe.

    ``without``: the ids of modules that are left out.
    """
    out = snapshot(leaf, without)
    for path, module in leaf.named_modules():
        if id(module) in without:
            continue
        each = [f for kind in HOOKS for f in vars(module)[kind].values()]
        users = [f for f in each if not library(getattr(f, "__module__", None) or "torch")]
        out.enter(f"{HOOKED} {path}", users)
    return out


def _own_alone(module: nn.Module) -> PythonState:
    """Returns the Python state of ``module`` without that of modules inside of it."""
    return _own(module, {*map(id, module.modules())} - {id(module)})


def _below(leaf: str, at: str) -> str:
    """Returns the model's name of ``at``, which is a name within ``leaf``."""
    if at.startswith(HOOKED):
        return f"{HOOKED} {leaf}.{at.removeprefix(HOOKED + ' ')}".strip(".")
    return f"{leaf}.{at}"


def _movable(leaf: str, model: nn.Module) -> None:
    """Refuses a generator: it would be shared with the plan's copy of the model, which advances it."""
    for path, module in model.named_modules(prefix=leaf):
        for name, value in vars(module).items():
            if isinstance(value, GeneratorType) and value.gi_frame is not None:
                at = f"{path}.{name}".lstrip(".")
                text = f"{at} is a generator, which cannot be copied: planning would advance it"
                cure = "make it in the forward, or use an iterator of itertools"
                raise RequestError((Problem("model", f"{text}; {cure}"),))
