"""State that a model's source files keep: global variables, class attributes, closures and defaults.

Values that their code stores on a library's modules and classes are included.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import itertools
import operator
import random
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from queue import SimpleQueue
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from launcher.parallel.model_state.deep_copy import TORCH_ATTRIBUTES, cells
from launcher.parallel.model_state.library_attributes import library_attributes, names_read
from launcher.parallel.model_state.process_state import ProcessSnapshot, process_state
from launcher.parallel.model_state.python_state import (
    BYTES,
    INSTALLED,
    LIBRARIES,
    PLAIN,
    TEXTS,
    PythonState,
    builtin,
    entries,
    library,
    mark,
    parts,
    queued,
)
from launcher.parallel.model_state.reachable_code import imports, reachable

FIXED = (FunctionType, ModuleType, property, classmethod, staticmethod, type, _lru_cache_wrapper)
"""Kinds of variables that are not state."""

ITERATORS: tuple[Any, ...] = (
    itertools.count,
    itertools.cycle,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
)
"""Iterators that can be copied, but not set back."""

PYTHONS = frozenset((*dir(ModuleType), *dir(type), *dir(object))) | {
    *(
        "__all__",
        "__builtins__",
        "__cached__",
        "__file__",
        "__loader__",
        "__package__",
        "__path__",
        "__spec__",
    ),
    *("__annotate__", "__annotate_func__", "__annotations_cache__", "__conditional_annotations__"),
    *("__firstlineno__", "__static_attributes__", "__slots__", "__warningregistry__", "__weakref__"),
}
"""Names of variables that Python itself sets."""

ENVIRONMENT = frozenset({"environ", "getenv"})
"""Names in code that reads environment variables."""

Restorers = dict[int, Callable[[], object]]
"""Maps the id of each object to the function that restores its contents."""


def files(*makers: Callable[..., Any]) -> list[str]:
    """Returns the Python modules that define these classes and functions, and those that they import from.

    Installed packages are left out, except the packages that the ``makers`` are from. What only a function
    that the ``makers`` can call imports is imported now: otherwise a forward would import it, and nobody
    would know its first values.
    """
    return _files(makers, makers)


def files_of(*models: nn.Module) -> list[str]:
    """Returns the ``files`` of all modules' classes, and of the user's functions among their attributes."""
    modules = [m for model in models for m in model.modules()]
    makers: list[Any] = [*map(type, modules), *(f for m in modules for f in functions_of(m))]
    attributes = [v for m in modules for name, v in vars(m).items() if name not in TORCH_ATTRIBUTES]
    return _files(makers, [*makers, *attributes])


def _files(makers: Sequence[Callable[..., Any]], starts: Iterable[Any]) -> list[str]:
    kinds = [k for m in dict.fromkeys(makers) for k in (m.__mro__ if isinstance(m, type) else (m,))]
    names = dict.fromkeys(k.__module__ for k in kinds)
    packages = {n.partition(".")[0] for n in names}
    for value in reachable(starts, lambda name: not _own(name, packages)):
        if isinstance(value, FunctionType):
            names |= dict.fromkeys(name for name in imports(value) if _import(name, packages))
    return _around(names, packages)


def functions_of(module: nn.Module) -> list[FunctionType]:
    """Returns the user's functions among the attributes of this module, and in its lists and tuples."""
    values = [*vars(module).values()]
    values += [v for box in values if type(box) in (list, tuple) for v in box]
    functions = [f for f in map(_function, values) if f is not None]
    return [f for f in functions if f.__module__ and not library(f.__module__)]


def _function(value: Any) -> FunctionType | None:
    while isinstance(value, partial | MethodType):
        value = value.func if isinstance(value, partial) else value.__func__
    return value if isinstance(value, FunctionType) else None


def _around(names: Iterable[str], packages: set[str]) -> list[str]:
    """Returns the modules of these names, and those that they import from."""
    modules: dict[str, None] = {}
    queue = deque(names)
    while queue:
        name = queue.popleft()
        if name in modules or name not in sys.modules or not _own(name, packages):
            continue
        modules[name] = None
        for value in vars(sys.modules[name]).values():
            if isinstance(value, FunctionType | type | ModuleType):
                queue.append(_from(value))
    return [*modules]


def _import(name: str, packages: set[str]) -> bool:
    """Imports a module of the user's; returns true if it exists."""
    if name not in sys.modules and _own(name, packages) and _is_found(name):
        with suppress(Exception):  # the user's file may raise anything, as it will when it is needed
            importlib.import_module(name)
    return name in sys.modules


def _is_found(name: str) -> bool:
    """Returns true if a module of this name is in a folder of the user's."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and not (spec.origin or "").startswith(INSTALLED)


def _own(name: str, packages: set[str]) -> bool:
    """Returns true if the module is the user's, or belongs to a package that the model is from."""
    top = name.partition(".")[0]
    return not library(name) or (top in packages and top not in LIBRARIES)


def _from(value: FunctionType | type | ModuleType) -> str:
    """Returns the name of the module that ``value`` is, or is defined in."""
    return value.__name__ if isinstance(value, ModuleType) else value.__module__


@dataclass
class _Walk:
    """The definitions in some Python modules, each with the name to show.

    ``owners`` are the modules and their classes, also nested ones. ``functions`` and ``caches`` (of
    ``lru_cache``) include those inside of decorators.
    """

    owners: list[tuple[str, Any]] = field(default_factory=list)
    functions: list[tuple[str, FunctionType]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)

    def state(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Yields each variable that is state: its shown name, its owner, its key and its value."""
        for at, owner in self.owners:
            for key, value in [*vars(owner).items()]:
                if key not in PYTHONS and not isinstance(value, FIXED):
                    yield f"{at}.{key}", owner, key, value
        classes = [owner for _, owner in self.owners if isinstance(owner, type)]
        yield from library_attributes((f for _, f in self.functions), classes)


def _walk(names: Iterable[str]) -> _Walk:
    """Walks through modules, classes and functions; what other modules define is left out."""
    names = [*names]
    walk, seen = _Walk(), set[int]()
    queue: deque[tuple[str, Any]] = deque((name, sys.modules[name]) for name in names)
    while queue:
        shown, value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))

        if isinstance(value, type) and value.__module__ in names:
            shown = f"{value.__module__}.{value.__qualname__}"
        elif isinstance(value, FunctionType) and value.__module__ in names:
            walk.functions.append((shown, value))
            queue += [(shown, cell.cell_contents) for _, cell in cells(value)]
            continue
        elif isinstance(value, property | classmethod | staticmethod | _lru_cache_wrapper):
            if isinstance(value, _lru_cache_wrapper) and value.__module__ in names:
                walk.caches.append(value)
            inner = (getattr(value, name, None) for name in ("fget", "__func__", "__wrapped__"))
            queue += [(shown, f) for f in inner if f is not None]
            continue
        elif not isinstance(value, ModuleType) or value is not sys.modules.get(shown):
            continue
        walk.owners.append((shown, value))
        queue += [(f"{shown}.{k}", v) for k, v in [*vars(value).items()] if not isinstance(v, ModuleType)]
    return walk


def variables(names: Iterable[str], by_contents: bool = False) -> PythonState:
    """Returns the state of these modules: global variables, class attributes, and variables of functions.

    The state of the process is included: environment variables, and settings such as a default dtype.
    ``by_contents``: as for ``PythonState``.
    """
    out = PythonState(by_value=True, by_contents=by_contents)
    for name, value in (*process_state(), *named_variables(names)):
        out.enter(name, value)
    return out


def named_variables(names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each variable of these modules, their classes and functions."""
    here = _walk(names)
    yield from ((shown, value) for shown, _, _, value in here.state())
    for shown, f in here.functions:
        yield from ((f"{name} of {shown}", cell.cell_contents) for name, cell in cells(f))
        yield f"the defaults of {shown}", [f.__defaults__, f.__kwdefaults__]
        yield shown, vars(f)


def variables_named(names: Iterable[str], read: frozenset[str]) -> Callable[[], Iterator[tuple[str, Any]]]:
    """Returns a function that yields the variables of these modules that have one of the names ``read``.

    It is quick, so that every step can call it: definitions are searched only once. Environment variables
    are included if code reads them.
    """
    here = _walk(names)
    owners = {id(owner) for _, owner in here.owners}
    elsewhere = [(at, owner, key) for at, owner, key, _ in here.state() if id(owner) not in owners]
    functions = [(at, f) for at, f in here.functions if f.__name__ != "__init__" and _keeps_state(f)]

    def now() -> Iterator[tuple[str, Any]]:
        for at, owner in here.owners:
            inside = vars(owner)
            for key in sorted(inside.keys() & read):
                if key not in PYTHONS and not isinstance(inside[key], FIXED):
                    yield f"{at}.{key}", inside[key]
        yield from ((at, vars(owner).get(key)) for at, owner, key in elsewhere if key in read)
        for at, f in functions:
            yield from ((f"{name} of {at}", cell.cell_contents) for name, cell in cells(f))
            yield f"the defaults of {at}", [f.__defaults__, f.__kwdefaults__]
        if read & ENVIRONMENT:
            yield from process_state()

    return now


def _keeps_state(f: FunctionType) -> bool:
    """Returns true if a function has variables, or defaults that can change in place."""
    defaults = (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())
    return bool(cells(f)) or not all(isinstance(v, PLAIN) for v in defaults)


def names_read_later(names: Iterable[str]) -> frozenset[str]:
    """Returns the names of variables and attributes in the code of these modules, constructors aside."""
    return names_read(f for _, f in _walk(names).functions if f.__name__ != "__init__")


def globals_of(names: Iterable[str]) -> Iterator[tuple[Any, str, Any]]:
    """Yields the global variables and class attributes of these modules: the owner, the key and the value."""
    yield from ((owner, key, value) for _, owner, key, value in _walk(names).state())


class GlobalsSnapshot:
    """The present values of these modules' variables, which ``restore`` brings back."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = [*names]
        here = _walk(self.names)
        self._before = {(id(owner), key): (owner, key, value) for _, owner, key, value in here.state()}
        self._closed = [(cell, cell.cell_contents) for _, f in here.functions for _, cell in cells(f)]
        self._empty = [cache for cache in here.caches if not cache.cache_info().currsize]

        # the contents of all of these
        values: list[Any] = [v for _, _, v in self._before.values()]
        values += [v for _, v in self._closed]
        values += [(f.__defaults__, f.__kwdefaults__, vars(f)) for _, f in here.functions]
        values += [v for cache in here.caches for v in _results(cache)]
        self._inside: Restorers = {}
        for value in values:
            _remember(value, self._inside)
        self._twins = {id(v): (mark(v), twin) for v in values if (twin := _twin(v)) is not None}

    def restore(self) -> None:
        """Restores the same values under the same names, with the same contents."""
        for owner, key, value in self._before.values():
            value = self._unmoved(value)
            if vars(owner).get(key, FIXED) is not value:
                setattr(owner, key, value)
        for owner, key in [
            (o, k) for _, o, k, _ in _walk(self.names).state() if (id(o), k) not in self._before
        ]:
            delattr(owner, key)
        for cell, value in self._closed:
            value = self._unmoved(value)
            if cell.cell_contents is not value:
                cell.cell_contents = value
        for restore in self._inside.values():
            restore()
        for cache in self._empty:
            if cache.cache_info().currsize:
                cache.cache_clear()

    def _unmoved(self, value: Any) -> Any:
        """Returns ``value``, or a copy of it as it was if it is an iterator that has advanced."""
        before, twin = self._twins.get(id(value), (None, None))
        return value if twin is None or mark(value) == before else _twin(twin)


class AroundSnapshot:
    """The present state around a model: the variables of these modules, and the state of the process."""

    def __init__(self, names: Iterable[str]) -> None:
        self._globals, self._process = GlobalsSnapshot(names), ProcessSnapshot()

    def restore(self) -> None:
        self._globals.restore()
        self._process.restore()


@contextmanager
def put_back(names: Iterable[str]) -> Iterator[None]:
    """Undoes all changes to the variables of these modules, and to the state of the process, on exit."""
    before = AroundSnapshot(names)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def contents_put_back(model: nn.Module) -> Iterator[None]:
    """Undoes changes to the containers and closures of the modules on exit, also changes through a copy."""
    values = [v for m in model.modules() for v in vars(m).values()]
    closed = [(cell, cell.cell_contents) for cell in _cells(values)]
    inside: Restorers = {}
    for value in values:
        _remember(value, inside)
    try:
        yield
    finally:
        for cell, value in closed:
            cell.cell_contents = value
        for restore in inside.values():
            restore()


def _cells(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the cells of the functions in ``values``, at any depth."""
    stack, seen = [*values], set[int]()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            yield from (cell for _, cell in cells(value))
        stack += [part for _, part in parts(value) or ()]


def _twin(value: Any) -> Any:
    """Returns a copy of an iterator of ``ITERATORS``; ``None`` for other values."""
    if not isinstance(value, ITERATORS):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python will drop copies of itertools
        try:
            return copy.deepcopy(value) if isinstance(value, itertools.cycle) else copy.copy(value)
        except TypeError:
            return None


def _results(cache: Any) -> Iterator[Any]:
    """Yields what an ``lru_cache`` has stored, which only the garbage collector can list."""
    for table in gc.get_referents(cache):
        if isinstance(table, dict) and table is not vars(cache):
            for value in table.values():  # of a bounded cache they are links of a list
                yield from gc.get_referents(value) if type(value).__name__ == "_lru_list_elem" else (value,)


def _remember(value: Any, inside: Restorers) -> None:
    """Adds to ``inside`` the functions that restore ``value`` and its parts, if these can be changed."""
    # its own contents
    inner = parts(value)
    if isinstance(value, np.ndarray):
        inside[id(value)] = partial(operator.setitem, value, ..., value.copy())
    elif isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided and not value.is_inference():
            inside[id(value)] = partial(_unwrite, value, value._version, value.detach().clone())
    elif isinstance(value, bytearray | array):
        inside[id(value)] = partial(operator.setitem, value, slice(None), value[:])
    elif isinstance(value, BYTES) and not memoryview(value).readonly:  # type: ignore[arg-type]
        inside[id(value)] = partial(_rewrite, value, bytes(memoryview(value)))  # type: ignore[arg-type]
    elif isinstance(value, TEXTS) and not value.closed:
        inside[id(value)] = partial(_retype, value, value.tell(), value.getvalue())
    elif isinstance(value, SimpleQueue):
        inside[id(value)] = partial(_requeue, value, queued(value))
    elif isinstance(value, set):
        inside[id(value)] = partial(_refill, value, set(value))
    elif isinstance(value, MutableMapping) and (now := entries(value)) is not None:
        inside.setdefault(id(value), partial(_refill, value, dict(now)))
        if not library(type(value).__module__):
            inside.setdefault(-id(value), _attributes(value))
    elif isinstance(value, list | deque):
        inside.setdefault(id(value), partial(_refill, value, [*value]))
    elif isinstance(value, ContextVar):
        inside[id(value)] = partial(_set, value, _get(value))
    elif (restore := _stream(value)) is not None:
        inside[id(value)] = restore
    elif inner is not None:
        inside.setdefault(id(value), _attributes(value))

    # those of its parts, each once
    for _, part in inner or ():
        if id(part) not in inside:
            _remember(part, inside)


def _rewrite(value: Any, before: bytes) -> None:
    """Sets the bytes of an object back, such as a number of ctypes."""
    memoryview(value).cast("B")[:] = before


def _retype(value: Any, place: int, before: str | bytes) -> None:
    """Sets the contents of a text in memory back, and the place at which it is read."""
    value.seek(0)
    value.truncate()
    value.write(before)
    value.seek(place)


def _requeue(queue: SimpleQueue[Any], before: list[Any]) -> None:
    """Sets the items of a queue back."""
    if len(now := queued(queue)) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
        for _ in now:
            queue.get_nowait()
        for item in before:
            queue.put(item)


def _unwrite(t: torch.Tensor, version: int, before: torch.Tensor) -> None:
    """Sets the values of a tensor back if they have changed, or may have since ``version``."""
    if t._version != version or not torch.equal(t, before):
        with torch.no_grad():
            t.copy_(before)


def _stream(value: Any) -> Callable[[], object] | None:
    """Returns a function that restores the present state of a random stream; ``None`` for other values."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return partial(value.set_state, value.get_state())
    return None


def _attributes(value: Any) -> Callable[[], None]:
    """Returns a function that restores the present attributes of an object."""
    return partial(_reset, value, dict(vars(value)) if hasattr(value, "__dict__") else None, _slots(value))


def _get(variable: ContextVar[Any]) -> Any:
    """Returns the value of a context variable, or its default; ``FIXED`` if it has neither."""
    try:
        return variable.get()
    except LookupError:
        return FIXED


def _set(variable: ContextVar[Any], value: Any) -> None:
    """Sets a context variable back; one that had no value keeps its present value."""
    if value is not FIXED and _get(variable) is not value:
        variable.set(value)


def _reset(value: Any, attributes: dict[str, Any] | None, slots: Sequence[tuple[Any, Any]]) -> None:
    """Sets the attributes of an object back, without calling methods of its class."""
    if attributes is not None:
        _refill(vars(value), attributes)
    for member, part in slots:
        now = _slot(member, value)
        if now is not part and part is not FIXED:
            member.__set__(value, part)
        elif now is not part:
            member.__delete__(value)


def _slots(value: Any) -> list[tuple[Any, Any]]:
    """Returns the ``__slots__`` that ``value`` has from the user's classes, with their contents."""
    kinds = [k for k in type(value).__mro__ if not library(k.__module__)]
    members = [m for k in kinds for m in vars(k).values() if isinstance(m, MemberDescriptorType)]
    return [(m, _slot(m, value)) for m in members]


def _slot(member: Any, value: Any) -> Any:
    """Returns the content of a slot, or ``FIXED`` if it is empty."""
    try:
        return member.__get__(value)
    except AttributeError:
        return FIXED


def _refill(value: Any, items: Any) -> None:
    """Sets the items of a container back; a container that still has the same objects is left alone."""
    if isinstance(value, MutableMapping):
        inside = dict(entries(value) or ())
        same = len(inside) == len(items) and all(k in inside and inside[k] is v for k, v in items.items())
    else:
        same = len(value) == len(items) and all(a is b for a, b in zip(value, items, strict=True))
    if same:
        return

    if isinstance(value, dict):
        methods = builtin(value)
        methods.clear(value)
        for key, part in items.items():
            methods.__setitem__(value, key, part)
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(items)
    else:
        value.update(items)
