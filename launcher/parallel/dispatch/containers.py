"""Finds, replaces and rebuilds tensors inside lists, dicts and dataclasses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from operator import getitem
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

Path = tuple[tuple[str, Any], ...]
"""The steps from a container to a tensor: each is ``("item", key)`` or ``("attribute", name)``."""


def inside(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yields every tensor in ``value`` with its path, in lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, some in value.items():
            yield from inside(some, (*path, ("item", key)))
    elif isinstance(value, list | tuple):
        for at, some in enumerate(value):
            yield from inside(some, (*path, ("item", at)))
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from inside(getattr(value, f.name, None), (*path, ("attribute", f.name)))


def tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of ``inside``."""
    return [t for _, t in inside(value)]


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Returns ``value`` with each of its tensors changed; values without tensors are returned as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if not tensors(value):
        return value
    if isinstance(value, PackedSequence):
        return repacked(value, change)
    args, kwargs = contents(value)
    assert args is not None, f"{type(value).__name__} holds tensors and cannot be rebuilt"
    named = {k: mapped(v, change) for k, v in kwargs.items()}
    return remade(type(value), *(mapped(a, change) for a in args), **named)


def repacked(value: PackedSequence, change: Callable[[torch.Tensor], Any]) -> PackedSequence:
    """Returns a packed sequence with its tensors changed, but not its batch sizes, which torch reads."""
    data, _, *order = value
    changed = (None if t is None else change(t) for t in order)
    return type(value)(change(data), value.batch_sizes, *changed)


def contents(a: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments with which ``remade`` rebuilds a container.

    The first is ``None`` if it is unknown how.
    """
    if isinstance(a, tuple) and hasattr(a, "_fields"):
        return tuple(a), {}
    if isinstance(a, tuple | list):
        return tuple(a), {}
    if isinstance(a, Mapping) and all(isinstance(k, str) for k in a):
        return (), dict(a)
    if is_dataclass(a) and not isinstance(a, type):
        return (), {f.name: getattr(a, f.name) for f in fields(a) if f.init}
    return None, {}


def filled(value: Any, objects: bool = False) -> Callable[[], bool]:
    """Returns a function that tells whether a list or mapping in ``value`` has changed.

    With ``objects``, dataclasses count too.
    """
    before = [(some, _members(some)) for some in _changeable(value, objects)]

    def changed() -> bool:
        now = ((_members(some), members) for some, members in before)
        return any(len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True)) for a, b in now)

    return changed


def _changeable(value: Any, objects: bool) -> Iterator[Any]:
    if isinstance(value, tuple):
        members: Any = value
    elif isinstance(value, list | deque | MutableMapping) or (objects and _object(value)):
        yield value
        members = _members(value)
    else:
        return
    for some in members:
        yield from _changeable(some, objects)


def _members(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return [*vars(value).values()] if _object(value) else [*value]


def _object(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")


def pick(value: Any, path: Path) -> Any:
    """Returns the object at ``path``."""
    for kind, key in path:
        value = getitem(value, key) if kind == "item" else getattr(value, key)
    return value


@dataclass(frozen=True)
class NamedFunction:
    """Any callable under a ``name`` that fx can write into code."""

    func: Callable[..., Any]
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)


@dataclass(frozen=True)
class Rebuilt(NamedFunction):
    """A function that rebuilds a container of its arguments, on each stage that uses it."""


@dataclass(frozen=True, eq=False)
class ConstantFunction:
    """A function that always returns the same object."""

    value: Any

    @property
    def __name__(self) -> str:
        name: str = getattr(self.value, "__qualname__", type(self.value).__qualname__)
        return name.replace(".", "_").replace("<", "_")

    def __call__(self) -> Any:
        return self.value


def remade(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Returns a container of ``kind``, with items in order or by name."""
    if issubclass(kind, tuple | list) and not hasattr(kind, "_fields"):
        return kind(args)
    return kind(*args, **kwargs)


def here() -> torch.device:
    """Returns the device of the rank that runs a graph; a stage that is built has the device in its place."""
    return torch.device("meta")


def clone_with_strides(t: torch.Tensor) -> torch.Tensor:
    """Returns a copy of ``t`` with the same strides, for code that asks for them: ``clone`` closes gaps.

    The copy of an expanded tensor is contiguous, because several of its elements share one place.
    """
    if t.is_contiguous() or 0 in t.stride():
        return t.clone()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
