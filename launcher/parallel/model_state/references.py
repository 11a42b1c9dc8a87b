"""Finds references to a model's tensors outside its modules: they would keep tensors that are replaced."""

from __future__ import annotations

import array
import gc
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from launcher.errors import Problem, RequestError
from launcher.parallel.model_state.deep_copy import HOOKS, behind, filled, hooks
from launcher.parallel.model_state.module_globals import files_of, named_variables, names_read_later, put_back
from launcher.plan.values.model_graph import ForeignMemory

P = TypeVar("P")
DEPTH, MOST = 8, 100_000
OWN = frozenset(vars(nn.Module()))
LIBRARIES = ("torch", "transformers", "launcher", "builtins")
OPAQUE = (
    type,
    ModuleType,
    str,
    bytes,
    int,
    float,
    complex,
    np.ndarray,
    np.generic,
    torch.dtype,
    torch.device,
)
"""Types that contain no tensors of a model."""
ARRAYS: tuple[Any, ...] = (np.ndarray, array.array, bytearray, memoryview)
PYTHONS = weakref.__file__.removesuffix("weakref.py")


def strangers(model: nn.Module, away: Callable[[Tensor], bool] = lambda t: t.is_meta) -> list[Problem]:
    """Returns a problem for each tensor or module that is kept where the launcher cannot give it values.

    ``away`` returns true for a tensor that the constructor itself has put on the meta device: such a tensor
    needs no values.
    """
    # other classes than plain modules and parameters
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            text = f"{name or 'the model'} is TorchScript, whose weights cannot be replaced"
            cure = "build it from the original module"
            return [Problem("model", f"{text} by shards; {cure}")]
    out: dict[str, Problem] = {}
    for name, p in model.named_parameters():
        if type(p) is not nn.Parameter and not nn.parameter.is_lazy(p):
            text = f"{name} is a {type(p).__name__}, a class that is lost when the tensor is sharded"
            out[name] = Problem("model", f"{text}; make it an nn.Parameter")

    # attributes of modules, and then of their classes and files
    mine = {id(t): n for n, t in named(model) if not (isinstance(t, nn.Parameter) and hooks(t))}
    known = {id(m) for m in model.modules()} | {id(t) for _, t in named(model)}
    for at, value in _kept(model):
        for item in inside(value, known):
            if id(item) in mine:
                out.setdefault(at, _itself(at, mine[id(item)]))
            elif isinstance(item, Node):
                out.setdefault(at, _node(at, item))
            elif isinstance(item, nn.Module) and id(item) not in known and not all(map(away, _own(item))):
                out.setdefault(at, _no_submodule(at, item))
            elif isinstance(item, Tensor) and id(item) not in known and not isinstance(item, nn.Parameter):
                text = (
                    f"{at} keeps tensors in a {type(value).__name__}, which the launcher can "
                    "neither fill with values nor move to a device"
                )
                out.setdefault(at, Problem("model", f"{text}; make each a buffer with register_buffer"))
        for number in _plain(value, int):
            if number in mine:
                out.setdefault(at, _by_id(at, mine[number]))
    for at, value in _around(model):
        for number in _plain(value, int):
            if number in mine:
                out.setdefault(at, _by_id(at, mine[number]))
        for item in inside(value, known):
            if id(item) in mine and isinstance(item, nn.Parameter):
                out.setdefault(at, _itself(at, mine[id(item)]))
            elif isinstance(item, Node) and id(getattr(item, "variable", None)) in mine:
                out.setdefault(at, _node(at, item))
    return list(out.values())


def arrays_of_parameters(model: nn.Module, shown: Sequence[tuple[Any, str]] = ()) -> list[Problem]:
    """Returns a problem for each numpy array in an attribute that shares memory with a trained parameter.

    ``shown`` has arrays that share the memory of parameters on meta, and the names of these parameters.
    """
    places = [(array.__array_interface__["data"][0], array.nbytes, name) for array, name in shown]
    for param, p in model.named_parameters():
        if p.requires_grad and p.device.type == "cpu" and not nn.parameter.is_lazy(p):
            memory = p.untyped_storage()
            places.append((memory.data_ptr(), memory.nbytes(), param))
    out: dict[str, Problem] = {}
    for at, value in _kept(model) if places else ():
        for shared in _plain(value, np.ndarray):
            place = shared.__array_interface__["data"][0]
            of = next((n for begin, size, n in places if begin <= place < begin + size), None)
            if of is not None:
                text = f"{at} is a numpy array that shares memory with {of}"
                text += ", but the array would no longer see its updates"
                out.setdefault(at, Problem("model", f"{text}; compute it from {of} in the forward"))
    return list(out.values())


def foreign_memory(model: nn.Module, in_memory: Callable[[Tensor], Tensor]) -> tuple[ForeignMemory, ...]:
    """Returns the model's tensors that share memory with an array in an attribute.

    Variables of the model's files are included, which may also have a torch tensor in place of the array.
    ``in_memory`` returns the tensor in memory that a tensor on meta stands for.
    """
    memory = {name: shown for name, t in named(model) if (shown := _bytes_of(in_memory(t))) is not None}
    if not memory:
        return ()
    files = files_of(model)
    places = [(at, buffer) for at, value in _kept(model) for buffer in _plain(value, ARRAYS)]
    for at, value in named_variables(files):
        places += [(at, buffer) for buffer in _plain(value, (*ARRAYS, Tensor))]
    later = names_read_later(files)
    out: dict[ForeignMemory, None] = {}
    for at, buffer in places:
        shown = _bytes_of(buffer) if isinstance(buffer, Tensor) else buffer
        if shown is not None:
            shown = shown if isinstance(shown, np.ndarray) else np.frombuffer(shown, np.uint8)
            of = [name for name, bytes_of in memory.items() if np.may_share_memory(shown, bytes_of)]
            read = " of " in at or at.rpartition(".")[2] in later  # a function refers to its own variables
            out |= dict.fromkeys(ForeignMemory(at, name, read) for name in of)
    return tuple(out)


def _bytes_of(t: Tensor) -> np.ndarray[Any, Any] | None:
    """Returns the memory of a tensor as an array; ``None`` if the tensor is not in the memory of the CPU."""
    if t.device.type != "cpu" or t.layout is not torch.strided or not t.numel():
        return None
    shown: np.ndarray[Any, Any] = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy()
    return shown


def _plain(value: Any, kind: type[P] | tuple[type[P], ...]) -> Iterator[P]:
    """Yields the objects of this ``kind`` in ``value``, also as keys, but not those of modules in it."""
    stack, seen = [(value, 0)], set[int]()
    while stack and len(seen) < MOST:
        some, depth = stack.pop()
        if isinstance(some, kind):
            yield some
        elif id(some) not in seen and not isinstance(some, (*OPAQUE, nn.Module)) and depth < DEPTH:
            seen.add(id(some))
            parts = [*some, *some.values()] if isinstance(some, dict) else _parts(some)
            stack += [(v, depth + 1) for v in parts[:MOST]]


def _itself(at: str, name: str) -> Problem:
    text = f"{at} holds the parameter {name}, but the launcher replaces that tensor with another one"
    return Problem("model", f"{text}; read the parameter from its module each time instead")


def _by_id(at: str, name: str) -> Problem:
    text = f"{at} contains the id() of {name}, but the launcher replaces that tensor with another one"
    return Problem("model", f"{text}; use its name instead")


def held_ties(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Returns the modules that refer to another in a Python attribute, with each weight that both have."""
    paths = {id(m): name for name, m in model.named_modules()}
    out: dict[tuple[str, str], None] = {}
    for path, module in model.named_modules():
        values = [v for n, v in vars(module).items() if n not in OWN and not isinstance(v, (*OPAQUE, Tensor))]
        held = [m for v in values for m in inside(v, paths) if isinstance(m, nn.Module) and id(m) in paths]
        if not held:
            continue

        # modules outside of it, except those that contain it and so have all of its weights
        own, below = {id(p) for p in module.parameters()}, {id(m) for m in module.modules()}
        for other in held:
            if id(other) not in below and all(m is not module for m in other.modules()):
                weights = other.named_parameters(paths[id(other)])
                out |= dict.fromkeys((path, name) for name, p in weights if id(p) in own)
    return tuple(out)


def held_modules(module: nn.Module) -> list[nn.Module]:
    """Returns the modules to which Python attributes of ``module`` or a part refer, without its own."""
    known = {id(m) for m in module.modules()}
    out: dict[int, nn.Module] = {}
    for part in module.modules():
        values = [v for n, v in vars(part).items() if n not in OWN and not isinstance(v, (*OPAQUE, Tensor))]
        for some in (m for value in values for m in inside(value, known)):
            if isinstance(some, nn.Module) and id(some) not in known:
                out[id(some)] = some
    return [*out.values()]


def _node(at: str, node: Node) -> Problem:
    text = f"{at} holds an autograd node ({node.name()}) that the constructor made"
    why = "but the launcher replaces the weights of that node, so the node's hooks are not called"
    cure = "use register_hook or register_post_accumulate_grad_hook of the weight instead"
    return Problem("model", f"{text}, {why}; {cure}")


def _no_submodule(at: str, module: nn.Module) -> Problem:
    text = f"{at} is or holds the module {type(module).__name__}, which is not a submodule"
    why = "so the launcher cannot initialize or move its tensors"
    cure = "make it an attribute of a module, or put it in an nn.ModuleList or nn.ModuleDict"
    return Problem("model", f"{text}, {why}; {cure}")


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns every parameter and buffer, by its first name."""
    return [*model.named_parameters(), *model.named_buffers()]


def inside(value: Any, known: Container[int] = ()) -> Iterator[Any]:
    """Yields tensors, modules and autograd nodes in ``value``, but nothing inside of ``known`` modules."""
    stack = [(value, 0)]
    seen = set[int]()

    while stack and len(seen) < MOST:
        # each object once
        some, depth = stack.pop()
        some = behind(some)
        if id(some) in seen or isinstance(some, OPAQUE) or some is None:
            continue
        seen.add(id(some))
        _CACHES.add(some)

        # itself, then its parts; those of a known module are not new
        if isinstance(some, Tensor | Node):
            yield some
        elif isinstance(some, nn.Module):
            yield some
            if id(some) in known:
                continue
        if depth < DEPTH:
            stack += [(v, depth + 1) for v in _parts(some)[:MOST]]


def _parts(some: Any) -> list[Any]:
    """Returns the parts of an object, as far as they are the user's."""
    if isinstance(some, dict):
        return [*some.values(), *(k for k in some if not isinstance(k, OPAQUE))]
    if isinstance(some, list | tuple | set | frozenset):
        return list(some)
    if isinstance(some, nn.Module):
        return [v for k, v in vars(some).items() if k not in OWN or k in ("_modules", *HOOKS)]

    # callables and references
    if isinstance(some, MethodType):
        return [some.__self__, some.__func__]
    if isinstance(some, BuiltinMethodType | MethodWrapperType):
        return [some.__self__]
    if isinstance(some, partial):
        return [some.func, some.args, some.keywords]
    if isinstance(some, weakref.ref):
        return [some()]
    if isinstance(some, _lru_cache_wrapper):
        return [v for v in gc.get_referents(some) if not isinstance(v, type)]
    if isinstance(some, FunctionType):
        cells = [c.cell_contents for c in some.__closure__ or () if filled(c)]
        return [*cells, some.__defaults__, some.__kwdefaults__, vars(some)]

    # any other object: its attributes, unless its class is torch's
    if type(some).__module__.startswith(("torch._", "torch.fx", "torch.utils", "torch.nn.utils")):
        return []
    slots = [getattr(some, s, None) for k in type(some).__mro__ for s in _slots(k)]
    return [*getattr(some, "__dict__", {}).values(), *slots]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def _kept(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of modules other than tensors and modules, and all hooks."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            flat = isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")  # torch renews them
            if name not in OWN and not isinstance(value, Tensor) and not flat:
                yield f"{path}.{name}".lstrip("."), value
        each = [h for name in HOOKS for h in vars(module)[name].values()]
        if each:
            yield f"a hook of {path or 'the model'}", each
    for name, p in model.named_parameters():
        each = [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]
        if each:
            yield f"a hook of {name}", each


def _around(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the class attributes of the modules, and the global variables of their files."""
    kinds = dict.fromkeys(k for m in model.modules() for k in type(m).__mro__ if _users(k.__module__))
    for kind in kinds:
        for name, value in list(vars(kind).items()):
            if not name.startswith("__"):
                yield f"{kind.__name__}.{name}", value
    for file in dict.fromkeys(k.__module__ for k in kinds):
        for name, value in list(vars(sys.modules.get(file, ModuleType(""))).items()):
            theirs = isinstance(value, FunctionType) and not _users(value.__module__ or "torch")
            if not name.startswith("__") and not theirs and not isinstance(value, nn.Module):
                yield f"{file}.{name}", value


def _users(module: str) -> bool:
    return module.partition(".")[0] not in LIBRARIES


def overlaps(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the names of different tensors that share memory."""
    at: dict[int, list[tuple[str, Tensor]]] = {}
    for name, t in named(model):
        if t.layout is torch.strided and t.numel():
            at.setdefault(int(t.untyped_storage()._cdata), []).append((name, t))
    out = []
    for same in at.values():
        if len(same) > 1 and not _disjoint([t for _, t in same]):
            out.append(tuple(n for n, _ in same))
    return tuple(out)


def _disjoint(tensors: list[Tensor]) -> bool:
    """Returns true if tensors of one storage share no element; tensors of several dtypes count as sharing."""
    if len({t.dtype for t in tensors}) > 1:
        return False
    taken = np.zeros(tensors[0].untyped_storage().nbytes() // tensors[0].element_size(), dtype=bool)
    for t in tensors:
        strides = [s * taken.itemsize for s in t.stride()]
        view = np.lib.stride_tricks.as_strided(taken[t.storage_offset() :], tuple(t.shape), strides)
        if view.any():
            return False
        view[...] = True
    return True


def computed(model: nn.Module) -> tuple[str, ...]:
    """Returns attributes that the constructor computed from weights: a gradient should flow through them."""
    return tuple(
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, t in (*module._buffers.items(), *vars(module).items())
        if isinstance(t, Tensor) and t.grad_fn is not None
    )


TORCHS = ("_is_buffer", "_is_param", "persistent")
"""Attributes that torch sets on tensors; modules have the same information."""


def tensor_attributes(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the Python attributes that users set on tensors, with the tensors' names, and removes them."""
    out: dict[str, tuple[str, ...]] = {}
    for name, t in named(model):
        for mark in [m for m in vars(t) if m not in TORCHS]:
            out[mark] = (*out.get(mark, ()), name)
            delattr(t, mark)
    return out


@contextmanager
def unmarked(
    lost: dict[str, tuple[str, ...]],
    reader: str = "the forward",
    cure: str = "store it on the module",
    key: str = "model",
) -> Iterator[None]:
    """Refuses, inside the block, code of the ``reader`` that reads one of the attributes ``lost``."""

    def read(t: Tensor, name: str) -> Any:
        if name not in lost:
            raise AttributeError(f"'{type(t).__name__}' object has no attribute '{name}'")
        text = f"{reader} reads the attribute {name} of {lost[name][0]}"
        why = "which is lost when the tensor is placed"
        raise RequestError((Problem(key, f"{text}, {why}; {cure}"),))

    if not lost:
        yield
        return
    Tensor.__getattr__ = read  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del Tensor.__getattr__  # type: ignore[attr-defined]


@dataclass
class _Caches:
    """The ``lru_cache`` functions in this process, and the misses that each had when last checked."""

    modules: dict[str, ModuleType] = field(default_factory=dict)
    seen: list[ModuleType] = field(default_factory=list)
    filled: dict[int, tuple[weakref.ref[Any], int]] = field(default_factory=dict)

    def add(self, some: Any) -> None:
        if type(some) is _lru_cache_wrapper and not _bare(some.__module__ or ""):
            self.filled.setdefault(id(some), (weakref.ref(some), 0))

    def look(self) -> None:
        """Adds the caches of newly imported modules; ``inside`` adds those that an object creates for itself.

        The caches are found as objects that refer to their class. A walk over all objects would change the
        reference count of each, and so copy the memory that a forked rank shares with its parent.
        """
        now = list(sys.modules.values())
        if now == self.seen:  # quick: list equality compares by identity first
            return
        self.seen = now
        loaded = list(sys.modules.items())
        new = {name: module for name, module in loaded if self.modules.get(name) is not module}
        self.modules |= new
        if not all(map(_bare, new)):
            for some in gc.get_referrers(_lru_cache_wrapper):
                self.add(some)


def _bare(module: str) -> bool:
    """Returns true if the caches of a module's functions contain no tensors that a forward has made."""
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return top in ("torch", "launcher", "sympy")

    # a user's module may have the name of one of Python's
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or file.startswith(PYTHONS)


_CACHES = _Caches()


def forget() -> None:
    """Clears the caches of functions (``lru_cache``) that contain meta tensors."""
    _CACHES.look()
    for key, (cache, before) in list(_CACHES.filled.items()):
        some = cache()
        if some is None:
            del _CACHES.filled[key]
            continue
        now = some.cache_info().misses
        if now != before:
            if any(map(_numberless, inside(some))):
                some.cache_clear()
                now = 0
            _CACHES.filled[key] = cache, now


def _numberless(some: Any) -> bool:
    return isinstance(some, Tensor) and some.is_meta


def tensors_outside(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Returns the meta tensors that are kept outside of the modules, and where."""
    return {id(t): (at, t) for at, value in _around(model) for t in inside(value) if _numberless(t)}


@contextmanager
def leaving(model: nn.Module, restores: bool = False) -> Iterator[None]:
    """Refuses a forward that leaves meta tensors behind, because a forward with values would find them.

    ``restores``: first sets the variables of the model's files back, so that ranks begin with empty caches.
    Stages would fill such a cache differently, so this is only for models that run in one piece.
    """
    before = tensors_outside(model)
    try:
        with put_back(files_of(model)) if restores else nullcontext():
            yield
    finally:
        forget()
    new = [at for key, (at, _) in tensors_outside(model).items() if key not in before]
    if new:
        text = f"the forward stores tensors in {new[0]}"
        why = "where ranks would find the plan's tensors without values"
        cure = "make them buffers, or compute them each time"
        raise RequestError((Problem("model", f"{text}, {why}; {cure}"),))
