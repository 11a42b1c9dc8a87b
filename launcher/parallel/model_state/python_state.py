"""Python state of a model as values that can be compared: numbers, containers, arrays, objects."""

from __future__ import annotations

import random
import site
import sys
import sysconfig
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from operator import is_
from types import FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from launcher.parallel.model_state.deep_copy import OURS, cells

Key = tuple[str, str]
"""An attribute, such as ``b.box``, and the path from there, such as ``.steps[0]``."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
WHOLE = (nn.Module, torch.Tensor, torch.Generator, FunctionType, MethodType, ModuleType, type)
"""Values that are equal only if they are the same object."""

LIBRARIES = sys.stdlib_module_names | {"hydra", "launcher", "numpy", "omegaconf", "torch", "transformers"}
INSTALLED = (*site.getsitepackages(), sysconfig.get_path("purelib"))
MANY, DEEP = 1000, 8
"""Values of longer containers must be the same objects; state is not expected below this depth."""


@cache
def library(name: str) -> bool:
    """Whether a module of this name is installed, and not the user's."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] in LIBRARIES or file.startswith(INSTALLED)


class PythonState:
    """Comparable marks of state.

    ``marks`` has a value for each place, which is equal as long as the state is. ``chains`` has the objects
    that lead to each place, by id; ``also`` has further attributes that lead to an object.
    """

    def __init__(self) -> None:
        self.marks: dict[Key, Any] = {}
        self.chains: dict[Key, tuple[int, ...]] = {}
        self.also: dict[int, list[str]] = {}
        self._first: dict[int, Key] = {}
        self._alive: list[Any] = []  # the id of a freed object could be reused

    def enter(self, name: str, value: Any) -> None:
        """Add the parts of ``value``, under ``name``."""
        self._walk((name, ""), value, ())

    def names(self, key: Key) -> list[str]:
        """Return every attribute that leads to the object at ``key``."""
        chain = self.chains.get(key, self.chains.get((key[0], ""), ()))
        return [*dict.fromkeys((key[0], *(n for i in chain for n in self.also.get(i, ()))))]

    def _walk(self, key: Key, value: Any, chain: tuple[int, ...]) -> None:
        # a single value
        inner = parts(value) if len(chain) <= DEEP else None
        if inner is None:
            self.marks[key], self.chains[key] = _mark(value), chain
            self._alive.append(value)
            return

        # an object seen before: the place of the first
        if id(value) in self.also:
            self.also[id(value)].append(key[0])
            self.marks[key], self.chains[key] = self._first[id(value)], chain
            return

        # anything else: its kind, and then its parts
        self.also[id(value)], self._first[id(value)] = [], key
        self._alive.append(value)
        self.marks[key], self.chains[key] = type(value), (*chain, id(value))
        for way, part in inner:
            self._walk((key[0], key[1] + way), part, (*chain, id(value)))


def held(model: nn.Module) -> PythonState:
    """Return the Python attributes of the modules, and which buffers they have."""
    out = PythonState()
    for path, module in model.named_modules():
        for name, value in [*vars(module).items(), *module._buffers.items()]:
            if name not in OURS:
                out.enter(f"{path}.{name}".lstrip("."), value)
    return out


def owns_generator(model: nn.Module) -> bool:
    """Whether a module keeps a generator of torch, whose state does not advance on meta tensors."""
    return any(isinstance(v, torch.Generator) for m in model.modules() for v in vars(m).values())


def changed(before: PythonState, after: PythonState) -> list[Key]:
    """Return the places that differ, in order."""
    a, b = before.marks, after.marks
    return [k for k in dict.fromkeys((*a, *b)) if k not in a or k not in b or not _same(a[k], b[k])]


def parts(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return the parts of ``value`` with their paths, or ``None`` if it is a single value."""
    if isinstance(value, FunctionType):
        return [(f".{name}", cell.cell_contents) for name, cell in cells(value)] or None
    if isinstance(value, (*PLAIN, *WHOLE, np.ndarray, np.generic)):
        return None

    # containers, unless they are too long
    inside = entries(value) if isinstance(value, Mapping) else None
    own = not library(type(value).__module__)
    if inside is not None and len(inside) <= MANY:
        named = [(f"[{k if isinstance(k, PLAIN) else id(k)!r}]", v) for k, v in inside]
        return [*named, *((f".{k}", v) for k, v in _own(value))] if own else named
    if isinstance(value, list | tuple | deque) and len(value) <= MANY:
        return [(f"[{n}]", v) for n, v in enumerate(value)]
    if inside is not None:
        return None

    # objects of the user's classes, and library objects that exist to hold values
    if isinstance(value, ContextVar):
        return [(".get()", value.get(None))]
    if isinstance(value, SimpleNamespace | threading.local) or own:
        return [(f".{k}", v) for k, v in _own(value)]
    return None


def entries(value: Mapping[Any, Any]) -> list[tuple[Any, Any]] | None:
    """Return the entries of a mapping; ``None`` if it is treated as any object of its class.

    No method of the user's runs: it may create values on access, and import modules for them.
    """
    if isinstance(value, dict):
        return [*builtin(value).items(value)]
    if not library(type(value).__module__):
        return None
    try:
        return [*value.items()]
    except Exception:  # it may raise anything
        return []


def builtin(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the class whose methods read and write ``value`` directly."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _own(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _mark(value: Any) -> Any:
    # values, and the states of random streams
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return value.get_state().numpy().tobytes()

    # the position of an iterator
    if isinstance(value, GeneratorType):
        return value.gi_frame and (value.gi_frame.f_lasti, repr(value.gi_frame.f_locals))
    if isinstance(value, Iterator):
        return _reduced(value)

    # a container that is not taken apart: the objects in it
    if isinstance(value, list | tuple | deque):
        return type(value), _Long(tuple(value))
    if isinstance(value, Mapping) and (inside := entries(value)) is not None:
        return type(value), _Long(tuple(v for _, v in inside))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(v if isinstance(v, PLAIN) else id(v) for v in value)
    return value


def _reduced(value: Any) -> Any:
    """Return an iterator's position if it can be reduced, else the iterator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return repr(value.__reduce__())
        except TypeError:
            return value


class _Long:
    """Many values, compared by identity first: most are the same objects."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Long) or len(self.values) != len(other.values):
            return False
        return all(map(is_, self.values, other.values)) or all(map(_same, self.values, other.values))

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, (*PLAIN, tuple, frozenset, np.generic, _Long)):
        return False
    return bool(a == b) or bool(a != a and b != b)


@contextmanager
def reading(model: nn.Module, names: Iterable[str], told: Callable[[str], None]) -> Iterator[None]:
    """Call ``told`` each time that one of the attributes ``names`` of ``model``'s modules is read."""
    wanted: dict[int, dict[str, str]] = {}
    kinds: set[type] = set()
    modules = dict(model.named_modules())
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = modules.get(path)
        if module is not None:
            wanted.setdefault(id(module), {})[attribute] = name
            kinds.add(type(module))
    plain = {kind: vars(kind).get("__getattribute__") for kind in kinds}

    def patch(kind: type) -> None:
        read: Any = kind.__getattribute__

        def looked(self: Any, attribute: str) -> Any:
            name = wanted.get(id(self), {}).get(attribute)
            if name is not None:
                told(name)
            return read(self, attribute)

        kind.__getattribute__ = looked  # type: ignore[method-assign, assignment]

    for kind in kinds:
        patch(kind)
    try:
        yield
    finally:
        for kind, was in plain.items():
            if was is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = was  # type: ignore[method-assign]
