"""State that a model's source files keep: global variables, class attributes, closures and defaults."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import nn

from launcher.parallel.model_state.deep_copy import cells
from launcher.parallel.model_state.python_state import (
    LIBRARIES,
    PythonState,
    builtin,
    entries,
    library,
    parts,
)

FIXED = (FunctionType, ModuleType, property, classmethod, staticmethod, type, _lru_cache_wrapper)
"""Kinds of variables that are not state."""


def files(*makers: Callable[..., Any]) -> list[str]:
    """Return the Python modules that define these classes and functions, and those that they import from.

    Installed packages are left out, unless a maker is from there.
    """
    kinds = [k for m in dict.fromkeys(makers) for k in (m.__mro__ if isinstance(m, type) else (m,))]
    return around(k.__module__ for k in kinds)


def around(names: Iterable[str]) -> list[str]:
    """Return the modules of these names, and those that they import from."""
    found: dict[str, None] = {}
    queue = deque(dict.fromkeys(names))
    packages = {n.partition(".")[0] for n in queue}
    while queue:
        name = queue.popleft()
        if name in found or name not in sys.modules or not _own(name, packages):
            continue
        found[name] = None
        for value in vars(sys.modules[name]).values():
            if isinstance(value, FunctionType | type | ModuleType):
                queue.append(_from(value))
    return [*found]


def _own(name: str, packages: set[str]) -> bool:
    """Whether the module is the user's, or in a package that the model is from."""
    top = name.partition(".")[0]
    return not library(name) or (top in packages and top not in LIBRARIES)


def _from(value: FunctionType | type | ModuleType) -> str:
    """Return the name of the module that ``value`` is, or is defined in."""
    return value.__name__ if isinstance(value, ModuleType) else value.__module__


def _all(names: Iterable[str]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield each variable's shown name, its owner, its key and its value."""
    for name in names:
        module = sys.modules[name]
        for key, value in [*vars(module).items()]:
            if isinstance(value, type) and value.__module__ == name:
                for k, v in [*vars(value).items()]:
                    yield f"{name}.{value.__qualname__}.{k}", value, k, v
            yield f"{name}.{key}", module, key, value


def _state(names: Iterable[str]) -> Iterator[tuple[str, Any, str, Any]]:
    for shown, owner, key, value in _all(names):
        if not (key.startswith("__") and key.endswith("__")) and not isinstance(value, FIXED):
            yield shown, owner, key, value


def _functions(names: Iterable[str]) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions that the modules and their classes define, and those inside of decorators."""
    stack = [(shown, value) for shown, _, _, value in _all(names)]
    seen = set[int]()
    while stack:
        shown, value = stack.pop()
        if isinstance(value, FunctionType) and id(value) not in seen and value.__module__ in names:
            seen.add(id(value))
            yield shown, value
            stack += [(shown, cell.cell_contents) for _, cell in cells(value)]
        elif isinstance(value, property | classmethod | staticmethod | _lru_cache_wrapper):
            inner = (getattr(value, name, None) for name in ("fget", "__func__", "__wrapped__"))
            stack += [(shown, f) for f in inner if f is not None]


def variables(names: Iterable[str]) -> PythonState:
    """Return the state of these modules: global variables, class attributes, and variables of functions."""
    names = [*names]
    out = PythonState()
    for shown, _, _, value in _state(names):
        out.enter(shown, value)
    for shown, f in _functions(names):
        for name, cell in cells(f):
            out.enter(f"{name} of {shown}", cell.cell_contents)
        out.enter(f"the defaults of {shown}", [f.__defaults__, f.__kwdefaults__])
        out.enter(shown, vars(f))
    return out


class GlobalsSnapshot:
    """The present values of these modules' variables, which ``restore`` brings back."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = [*names]
        self._before = {(id(owner), key): (owner, key, value) for _, owner, key, value in _state(self.names)}
        functions = [f for _, f in _functions(self.names)]
        self._closed = [(cell, cell.cell_contents) for f in functions for _, cell in cells(f)]

        # the contents of all of these
        values: list[Any] = [v for _, _, v in self._before.values()]
        values += [v for _, v in self._closed]
        values += [(f.__defaults__, f.__kwdefaults__, vars(f)) for f in functions]
        self._inside: dict[int, tuple[Any, Any]] = {}
        for value in values:
            _remember(value, self._inside)

    def restore(self) -> None:
        """Restore the same values under the same names, with the same contents."""
        for owner, key, value in self._before.values():
            if vars(owner).get(key, _state) is not value:
                setattr(owner, key, value)
        for owner, key in [(o, k) for _, o, k, _ in _state(self.names) if (id(o), k) not in self._before]:
            delattr(owner, key)
        for cell, value in self._closed:
            if cell.cell_contents is not value:
                cell.cell_contents = value
        for value, held in self._inside.values():
            _refill(value, held)


@contextmanager
def put_back(names: Iterable[str]) -> Iterator[None]:
    """Undo all changes to the variables of these modules on exit."""
    before = GlobalsSnapshot(names)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def contents_put_back(model: nn.Module) -> Iterator[None]:
    """Undo changes to the containers and closures of the modules on exit, also those made through a copy."""
    values = [v for m in model.modules() for v in vars(m).values()]
    closed = [(cell, cell.cell_contents) for cell in _cells(values)]
    inside: dict[int, tuple[Any, Any]] = {}
    for value in values:
        _remember(value, inside)
    try:
        yield
    finally:
        for cell, value in closed:
            cell.cell_contents = value
        for value, held in inside.values():
            _refill(value, held)


def _cells(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the cells of the functions in ``values``, at any depth."""
    stack, seen = [*values], set[int]()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            yield from (cell for _, cell in cells(value))
        stack += [part for _, part in parts(value) or ()]


def _remember(value: Any, inside: dict[int, tuple[Any, Any]]) -> None:
    """Add the contents of ``value`` and of its parts to ``inside``, as far as they can be changed."""
    # its own contents
    inner = parts(value)
    if isinstance(value, np.ndarray):
        inside[id(value)] = value, value.copy()
    elif isinstance(value, set):
        inside[id(value)] = value, set(value)
    elif isinstance(value, MutableMapping) and (now := entries(value)) is not None:
        inside.setdefault(id(value), (value, dict(now)))
        if hasattr(value, "__dict__") and not library(type(value).__module__):
            inside.setdefault(id(vars(value)), (vars(value), dict(vars(value))))
    elif isinstance(value, list | deque):
        inside.setdefault(id(value), (value, [*value]))
    elif inner is not None and hasattr(value, "__dict__"):
        inside.setdefault(id(value), (value, dict(vars(value))))

    # those of its parts, each once
    for _, part in inner or ():
        if id(part) not in inside:
            _remember(part, inside)


def _refill(value: Any, held: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = held
        return

    # containers with the same objects are left alone
    mapping = isinstance(value, MutableMapping) and entries(value) is not None
    now = value if mapping or not isinstance(held, dict) else vars(value)
    if isinstance(now, MutableMapping):
        inside = dict(entries(now) or ())
        same = len(inside) == len(held) and all(k in inside and inside[k] is v for k, v in held.items())
    else:
        same = len(now) == len(held) and all(a is b for a, b in zip(now, held, strict=True))
    if same:
        return

    if isinstance(now, dict):
        methods = builtin(now)
        methods.clear(now)
        for key, part in held.items():
            methods.__setitem__(now, key, part)
        return
    now.clear()
    if isinstance(now, list | deque):
        now.extend(held)
    else:
        now.update(held)
