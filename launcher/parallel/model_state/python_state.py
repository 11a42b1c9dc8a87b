"""Finds, names and restores state that a model keeps in Python objects."""

from __future__ import annotations

import ctypes
import gc
import io
import random
import site
import sys
import sysconfig
import threading
import warnings
from argparse import Namespace
from array import array
from collections import OrderedDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from mmap import mmap
from operator import is_
from queue import Empty, Queue, SimpleQueue
from types import (
    BuiltinMethodType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.deep_copy import TORCH_ATTRIBUTES, cells
from launcher.plan.cut.stages import covers

TENSORS = (torch.Tensor, nn.Parameter)
"""Types of tensors whose attributes are the user's; subclasses such as DTensor keep their own in them."""
Key = tuple[str, str]
"""An attribute, such as ``b.box``, and the path from there, such as ``.steps[0]``."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
BY_IDENTITY = (nn.Module, torch.Tensor, torch.Generator, FunctionType, MethodType, ModuleType, type)
"""Values that are equal only if they are the same object."""

SINGLE: tuple[type, ...] = (*PLAIN, *BY_IDENTITY, np.ndarray, np.generic)
"""Values without parts."""

BYTES: tuple[type, ...] = (bytearray, array, memoryview, mmap, ctypes.c_int.__mro__[-2])
"""Types whose bytes Python can change in place; the last is the base class of all types of ctypes."""

TEXTS = (io.StringIO, io.BytesIO)
CHANGED_IN_PLACE = (
    random.Random, np.random.Generator, np.random.RandomState, torch.Generator, np.ndarray, Iterator, *BYTES,
    *TEXTS, SimpleQueue,
)  # fmt: skip
"""Single values that can change in place; every module that has one sees the change."""

HOLDERS = (SimpleNamespace, Namespace, threading.local, threading.Event, threading.Semaphore, Queue, UserList)
"""Types of libraries that exist to hold values, in attributes."""

LIBRARIES = sys.stdlib_module_names | {"hydra", "launcher", "numpy", "omegaconf", "torch", "transformers"}
COMPILED = ("_cython_", "pybind11_builtins")
"""Beginnings of the module names of function types that Cython and pybind11 create, as for numpy."""
INSTALLED = (*site.getsitepackages(), sysconfig.get_path("purelib"))
MANY, DEEP = 1000, 8
"""Containers with more values, and objects at a greater depth, are compared; their parts are not searched."""

LARGE = 1 << 18
"""A tensor outside of the model that has more elements is compared by its version, not by its values."""


PROCESS_STREAMS: tuple[Any, ...] = (vars(random)["_inst"], vars(np.random.mtrand)["_rand"])
"""The random streams of the process, to which functions such as ``random.random`` are bound."""


@cache
def library(name: str) -> bool:
    """Returns true if a module of this name belongs to a library, and not to the user."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] in LIBRARIES or file.startswith(INSTALLED) or name.startswith(COMPILED)


class PythonState:
    """Comparable marks of state.

    ``marks`` has a value for each place, which stays equal as long as the state does. ``chains`` has the
    objects that lead to each place, by id; ``also`` has further attributes that lead to an object;
    ``shared_generators`` has the places of generators of torch to which several attributes lead.
    ``tensors`` has the tensor at each place.

    ``by_value``: new values in a tensor on the CPU are a change. Otherwise only a new tensor object is one,
    because other checks compare the values of a model's own tensors. ``by_contents``: of a tensor only its
    values count, so that states of two copies of a model can be compared. ``only_plain``: of other values
    than tensors, only numbers, texts and sets are compared, which is quick: no array and no long container
    is copied.
    """

    def __init__(self, by_value: bool = False, only_plain: bool = False, by_contents: bool = False) -> None:
        self.marks: dict[Key, Any] = {}
        self.tensors: dict[Key, torch.Tensor] = {}
        self.chains: dict[Key, tuple[int, ...]] = {}
        self.also: dict[int, list[str]] = {}
        self.shared_generators: list[Key] = []
        self._by_value, self._only_plain, self._by_contents = by_value, only_plain, by_contents
        self._first: dict[int, Key] = {}
        self._alive: list[Any] = []  # the id of a freed object could be reused

    def enter(self, name: str, value: Any) -> None:
        """Adds the parts of ``value``, under ``name``."""
        self._walk((name, ""), value, ())

    def names(self, key: Key) -> list[str]:
        """Returns every attribute that leads to the object at ``key``."""
        chain = self.chains.get(key, self.chains.get((key[0], ""), ()))
        return [*dict.fromkeys((key[0], *(n for i in chain for n in self.also.get(i, ()))))]

    def _walk(self, key: Key, value: Any, chain: tuple[int, ...]) -> None:
        # most values, for speed
        if type(value) in PLAIN:
            self.marks[key], self.chains[key] = value, chain
            return

        # a single value that cannot change, or is not compared
        inner = parts(value) if len(chain) <= DEEP else None
        if (
            inner is None
            and self._only_plain
            and not isinstance(value, (*PLAIN, set, frozenset, torch.Tensor))
        ):
            self.marks[key], self.chains[key] = type(value), chain
            return
        if inner is None and not isinstance(value, CHANGED_IN_PLACE):
            self.marks[key], self.chains[key] = self._mark(value), chain
            if isinstance(value, torch.Tensor):
                self.tensors[key] = value
            self._alive.append(value)
            return

        # an object seen before: the place of the first
        if id(value) in self.also:
            self.also[id(value)].append(key[0])
            self.marks[key], self.chains[key] = self._first[id(value)], chain
            if isinstance(value, torch.Generator):
                self.shared_generators.append(self._first[id(value)])
            return

        # anything else: its kind, and then its parts
        self.also[id(value)], self._first[id(value)] = [], key
        self._alive.append(value)
        single = inner is None or _builtin_iterator(value)
        self.marks[key], self.chains[key] = mark(value) if single else type(value), (*chain, id(value))
        for way, part in inner or ():
            self._walk((key[0], key[1] + way), part, (*chain, id(value)))

    def _mark(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return mark(value)
        if self._by_contents:
            return _contents(value)
        return _mark_of_values(value) if self._by_value else mark(value)


def snapshot(model: nn.Module, without: Collection[int] = (), by_contents: bool = False) -> PythonState:
    """Returns the Python attributes of the modules and their tensors, and which buffers they have.

    ``without``: the ids of modules that are left out. ``by_contents``: as for ``PythonState``.
    """
    out = PythonState(by_contents=by_contents)
    for path, module in model.named_modules():
        if id(module) in without:
            continue
        for name, value in [*vars(module).items(), *module._buffers.items()]:
            if name not in TORCH_ATTRIBUTES:
                out.enter(f"{path}.{name}".lstrip("."), value)
        for name, t in [*module._parameters.items(), *module._buffers.items()]:
            for attribute, value in vars(t).items() if type(t) in TENSORS else ():
                out.enter(f"{path}.{name}.{attribute}".lstrip("."), value)
    return out


def owns_generator(model: nn.Module) -> bool:
    """Returns true if a module has a generator of torch, whose state does not advance on meta tensors."""
    return any(isinstance(v, torch.Generator) for m in model.modules() for v in vars(m).values())


def changed(before: PythonState, after: PythonState) -> list[Key]:
    """Returns the places that differ, in order."""
    a, b = before.marks, after.marks
    return [k for k in dict.fromkeys((*a, *b)) if k not in a or k not in b or not same_mark(a[k], b[k])]


def parts(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Returns the parts of ``value`` with their paths, or ``None`` if it is a single value."""
    if isinstance(value, FunctionType):
        return [(f".{name}", cell.cell_contents) for name, cell in cells(value)] or None
    if isinstance(value, MethodType | BuiltinMethodType | MethodWrapperType):
        bound = value.__self__
        single = isinstance(bound, (ModuleType, nn.Module, type)) or any(bound is s for s in PROCESS_STREAMS)
        return None if bound is None or single else [(".__self__", bound)]
    if isinstance(value, SINGLE):
        return None
    if isinstance(value, partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if _builtin_iterator(value):
        return [
            (f".{n}", v) for n, v in enumerate(gc.get_referents(value)) if not isinstance(v, type)
        ] or None

    # containers, unless they are too long
    if isinstance(value, dict) and dict.__len__(value) > MANY:
        return None
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
    if isinstance(value, HOLDERS) or own:
        return [(f".{k}", v) for k, v in _own(value)]
    return None


def _builtin_iterator(value: Any) -> bool:
    """Returns true for an iterator of Python's own, such as ``zip``, whose place is state too."""
    kind = type(value)
    known = kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    return known and kind is not GeneratorType


def entries(value: Mapping[Any, Any]) -> list[tuple[Any, Any]] | None:
    """Returns the entries of a mapping, or ``None`` if it is treated like any other object.

    No method of a user's class is called: it may create values on access, and import modules for them.
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
    """Returns the class whose methods read and write ``value`` directly."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _own(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def mark(value: Any) -> Any:
    """Returns an object that stays equal as long as ``value``, apart from its parts, has the same state."""
    # values, and the states of random streams
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, random.SystemRandom):
        return value  # it has no state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return generator_state(value)

    if isinstance(value, BYTES):
        return bytes(memoryview(value))  # type: ignore[arg-type]
    if isinstance(value, TEXTS):
        return None if value.closed else (value.tell(), value.getvalue())
    if isinstance(value, SimpleQueue):
        return _Long(tuple(queued(value)))

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


def queued(queue: SimpleQueue[Any]) -> list[Any]:
    """Returns the items of a queue, which stay in it."""
    items = []
    with suppress(Empty):
        while True:
            items.append(queue.get_nowait())
    for item in items:
        queue.put(item)
    return items


class TensorMark(NamedTuple):
    """The state of a tensor: equal marks are of one object with equal values.

    ``digest`` is that of its values; ``None`` for a large tensor and on a device. ``learns``: it requires a
    gradient.
    """

    id: int
    kind: tuple[torch.Size, torch.dtype]
    learns: bool
    version: int
    digest: bytes | None


def new_values(before: TensorMark, after: TensorMark) -> bool:
    """Returns true if ``after`` has other values in the same shape, in a tensor that requires no gradient.

    A tensor without a digest has other values if it was changed in place. A tensor of another shape may be a
    cache that has grown.
    """
    if before.learns or after.learns or before.kind != after.kind:
        return False
    if before.digest is None or after.digest is None:
        return before.id == after.id and before.version != after.version
    return before.digest != after.digest


def _mark_of_values(t: torch.Tensor) -> TensorMark | tuple[int]:
    """Returns a mark of the tensor's values, or of the object alone if they cannot be read."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        if t.device.type == "meta" or t.layout is not torch.strided or t.is_inference() or _is_special(t):
            return (id(t),)
        digest = _digest(t) if t.device.type == "cpu" and t.numel() <= LARGE else None
        version = t._version if digest is None else 0  # of known values, only the values count
        return TensorMark(id(t), (t.shape, t.dtype), t.requires_grad, version, digest)


def _contents(t: torch.Tensor) -> Any:
    """Returns a mark that is equal for two tensors with equal values; without values, of the same kind."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        readable = t.device.type == "cpu" and t.layout is torch.strided and not _is_special(t)
        return type(t).__name__, tuple(t.shape), str(t.dtype), _digest(t) if readable else None


def _digest(t: torch.Tensor) -> bytes:
    """Returns a digest of the values of a tensor on the CPU."""
    values = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_digest(memoryview(values.numpy()))  # type: ignore[arg-type]


def _is_special(t: torch.Tensor) -> bool:
    """Returns true for a tensor that consists of others, and for one whose memory has been freed."""
    consists = getattr(type(t), "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__
    if consists or t.is_nested or t.is_quantized:
        return True
    return t.numel() > 0 and t.untyped_storage().nbytes() == 0


def generator_state(generator: torch.Generator) -> bytes:
    """Returns the state of a random stream on the CPU, unseen by a trace that records the model's code."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return generator.get_state().numpy().tobytes()


def _reduced(value: Any) -> Any:
    """Returns an iterator's position, as ``__reduce__`` gives it, or the iterator if it cannot be reduced."""
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
        return all(map(is_, self.values, other.values)) or all(map(same_mark, self.values, other.values))

    __hash__ = None  # type: ignore[assignment]


def same_mark(a: Any, b: Any) -> bool:
    """Returns true if two marks are of the same state."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, (*PLAIN, tuple, frozenset, np.generic, _Long)):
        return False
    return bool(a == b) or bool(a != a and b != b)


@contextmanager
def reading(
    model: nn.Module, names: Iterable[str], report: Callable[[str], None], only_first: bool = False
) -> Iterator[None]:
    """Calls ``report`` each time that one of the attributes ``names`` of ``model``'s modules is read.

    ``only_first``: not after it has been set inside of the block, because the read then gets the new value.
    """
    names_by_module: dict[int, dict[str, str]] = {}
    kinds: set[type] = set()
    modules = dict(model.named_modules())
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = modules.get(path)
        if module is not None:
            names_by_module.setdefault(id(module), {})[attribute] = name
            kinds.add(type(module))
    methods = ("__getattribute__", "__setattr__")
    plain = [(kind, method, vars(kind).get(method)) for kind in kinds for method in methods]
    after_set: set[str] = set()

    def patch(kind: type) -> None:
        read: Any = kind.__getattribute__
        write: Any = kind.__setattr__

        def looked(self: Any, attribute: str) -> Any:
            name = names_by_module.get(id(self), {}).get(attribute)
            if name is not None and name not in after_set:
                report(name)
            return read(self, attribute)

        def set_to(self: Any, attribute: str, value: Any) -> None:
            write(self, attribute, value)
            name = names_by_module.get(id(self), {}).get(attribute)
            if name is not None and only_first:
                after_set.add(name)

        kind.__getattribute__ = looked  # type: ignore[method-assign, assignment]
        kind.__setattr__ = set_to  # type: ignore[method-assign, assignment]

    for kind in kinds:
        patch(kind)
    try:
        yield
    finally:
        for kind, method, was in plain:
            if was is None:
                delattr(kind, method)
            else:
                setattr(kind, method, was)


def counters(
    before: PythonState, after: PythonState, leaves: frozenset[str], copies: Iterable[Key]
) -> list[str]:
    """Returns the attributes in ``leaves`` that a forward changes.

    ``copies`` has those that changed in a leaf's copy. Raises ``RequestError`` for attributes outside of
    ``leaves``, and for objects that several leaves share. A generator of torch that several leaves share
    counts as changed, because its state does not advance on meta tensors.
    """
    out: dict[str, None] = {}
    for key in (*changed(before, after), *copies, *after.shared_generators):
        # all names of the object, and the leaves that contain them
        names = after.names(key) if key in after.marks else before.names(key)
        owners = {n: next((u for u in leaves if covers(u, n)), None) for n in names}

        # there must be exactly one leaf, whose stage sees the change
        lost = [n for n, leaf in owners.items() if leaf is None]
        if lost:
            text = f"the forward changes {lost[0]}, which is on no stage"
            why = "no other stage and no later step would see the change"
            raise RequestError((Problem("model", f"{text}: {why}; keep it in a module that has a stage"),))
        if len(set(owners.values())) > 1:
            text = f"the forward changes {names[0]}, a Python object that is also {' and '.join(names[1:])}"
            cure = "give each module its own, or pass a tensor from one to the other"
            why = "another stage would not see the change"
            raise RequestError((Problem("model", f"{text}: {why}; {cure}"),))
        if key not in after.shared_generators:
            out |= dict.fromkeys(names)
    return [*out]


@contextmanager
def untouched(models: Iterable[nn.Module], names: Iterable[str]) -> Iterator[None]:
    """Restores ``models`` on exit, to the last bit.

    This restores the tensors in ``names`` that exist, the attributes of all modules, and the items of lists,
    dicts and sets among these attributes, but nothing deeper.
    """
    names, models = tuple(names), tuple(models)
    tensors = [t for model in models for t in _tensors(model, names)]
    values = [(m, _values(m)) for model in models for m in model.modules()]
    try:
        yield
    finally:
        for module, before in values:
            _put_back(module, before)
        with torch.no_grad():
            for home, name, t, kept in tensors:
                home[name] = t
                t.copy_(kept)


def _tensors(
    model: nn.Module, names: tuple[str, ...]
) -> Iterator[tuple[Any, str, torch.Tensor, torch.Tensor]]:
    """Yields for each tensor the dict that it is in, its name there, the tensor and a copy."""
    for path, module in model.named_modules(remove_duplicate=False) if names else ():
        for home in (module._parameters, module._buffers):
            for name, t in home.items():
                if t is not None and f"{path}.{name}".lstrip(".") in names:
                    yield home, name, t, t.detach().clone()


def _values(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Returns the user's attributes of a module, with copies of the containers among them."""
    return {
        k: (v, type(v)(v) if type(v) in (list, dict, set) else None)
        for k, v in vars(module).items()
        if k not in TORCH_ATTRIBUTES
    }


def _put_back(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    now = vars(module)
    for k in [k for k in now if k not in TORCH_ATTRIBUTES and k not in before]:
        del now[k]
    for k, (value, inside) in before.items():
        now[k] = value
        if inside is not None:
            _fill(value, inside)


def _fill(value: Any, inside: Any) -> None:
    if isinstance(value, list):
        value[:] = inside
    else:
        value.clear()
        value.update(inside)
