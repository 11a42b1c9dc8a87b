"""Finds results of modules that share memory with tensors of the caller, and later changes of these tensors.

For a module with sharded weights, FSDP2 replaces each input that needs a gradient by a new tensor, and copies
each result that is a view. So a later change of a result in place does not change the input, nor the other
way round. An attribute that is set on one of them is not set on the other.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import combinations, product
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from launcher.parallel.dispatch.modes import batched, tree_leaves
from launcher.parallel.trace.tensor_side_effects import StateEffects

MOST = 10_000
"""The most objects to search in one result."""

LARGE = 2**24
"""The most elements of a storage in which to search for overlaps."""

DATACLASSES = torch.__version__ >= "2.13"
"""True if FSDP2 of this torch finds the tensors in a dataclass. That of torch 2.11 does not."""

PLAIN = (
    bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout, torch.Size, range,
    slice,
)  # fmt: skip
"""Classes of values without tensors."""


@dataclass(frozen=True)
class _Pair:
    """Two tensors that share memory when ``module`` ends.

    ``versions``: how often each had been written by then. ``attributes``: the attributes that each had then.
    """

    module: str
    one: Tensor
    two: Tensor
    versions: tuple[tuple[int, int], ...]
    attributes: tuple[dict[str, Any], ...]


class MemoryOfResults:
    """Records modules that may compute something else with sharded weights: their results share memory.

    Attributes:
        changed: modules whose result shares memory with an input or with another result, if one of the two
            is changed later.
        named: modules that set an attribute on an input, or whose result is an input that gets an attribute
            later.
        opaque: modules whose result has an object in which FSDP2 finds no tensors, each with its class; ""
            for a module that returns no tensor with a gradient, but leaves one elsewhere, as in an attribute.
    """

    def __init__(self, effects: StateEffects) -> None:
        self.changed: dict[str, None] = {}
        self.named: dict[str, None] = {}
        self.opaque: dict[str, str] = {}
        self._effects = effects
        self._pairs: list[_Pair] = []
        self._arguments: list[tuple[list[Tensor], list[dict[str, Any]]]] = []
        self._began: list[int] = []
        self._without_results: dict[str, range] = {}

    def enter(self, arguments: tuple[Tensor, ...]) -> None:
        """Notes that a module begins to run."""
        self._began.append(_sequence())
        with torch._C.DisableTorchFunction():
            passed = [t for t in arguments if t.requires_grad and not batched(t)]
            self._arguments.append((passed, [_attributes(t) for t in passed]))

    def leave(self, name: str, output: Any) -> None:
        """Notes that module ``name`` ends."""
        with torch._C.DisableTorchFunction():  # a trace does not record what this reads
            self._compare(name, output)
            if not self._began:
                self._leaked(output)

    def _leaked(self, output: Any) -> None:
        """Records the modules without results with a gradient to which the model's output leads back.

        Autograd numbers its nodes in the order in which they are made, so a module has made those with the
        numbers that were given out as it ran.
        """
        if not self._without_results:
            return
        stack = [t.grad_fn for t in _leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
        seen = set(stack)
        while stack:
            node = stack.pop()
            for name, numbers in self._without_results.items():
                if node._sequence_nr() in numbers:
                    self.opaque.setdefault(name, "")
            new = {fn for fn, _ in node.next_functions if fn is not None} - seen
            seen |= new
            stack += new

    def _compare(self, name: str, output: Any) -> None:
        passed, attributes = self._arguments.pop()
        if any(_other(_attributes(t), before) for t, before in zip(passed, attributes, strict=True)):
            self.named[name] = None
        leaves = [*_leaves(output)]
        results = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad and not batched(t)]
        numbers = range(self._began.pop(), _sequence())
        if numbers and not results:
            self._without_results[name] = numbers
        copied = ((a, b) for a, b in combinations(results, 2) if a._is_view() or b._is_view())
        for one, two in (*product(passed, results), *copied):
            if self._shared(one, two):
                pair = _Pair(name, one, two, self._versions(one, two), (_attributes(one), _attributes(two)))
                self._pairs.append(pair)
        for value in leaves:
            if not isinstance(value, Tensor) and _leads_to_tensors(value):
                self.opaque.setdefault(name, type(value).__qualname__)

    def replaced(self, t: Any) -> None:
        """Notes that the data of ``t`` is replaced."""
        self.changed |= dict.fromkeys(p.module for p in self._pairs if t is p.one or t is p.two)

    def settle(self) -> None:
        """Records the modules whose tensors have changed since; called at the end of the forward."""
        with torch._C.DisableTorchFunction():  # a trace does not record what this reads
            for p in self._pairs:
                if self._versions(p.one, p.two) != p.versions and _overlap(p.one, p.two):
                    self.changed[p.module] = None
                now = _attributes(p.one), _attributes(p.two)
                if any(_other(a, b) for a, b in zip(now, p.attributes, strict=True)):
                    self.named[p.module] = None

    def _shared(self, one: Tensor, two: Tensor) -> bool:
        memory = self._effects.memory(one)
        return memory != 0 and memory == self._effects.memory(two)

    def _versions(self, *some: Tensor) -> tuple[tuple[int, int], ...]:
        return tuple((version(t), self._effects.writes(t)) for t in some)


def _leaves(output: Any) -> Iterator[Any]:
    """Yields what FSDP2 finds in the result of a module, and the objects in which it does not look."""
    for leaf in tree_leaves(output):
        if DATACLASSES and is_dataclass(leaf) and not isinstance(leaf, type):
            for f in fields(leaf):
                yield from _leaves(getattr(leaf, f.name, None))
        else:
            yield leaf


def _sequence() -> int:
    """Returns the number of the next node of autograd's graph."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def version(t: Tensor) -> int:
    """Returns how often ``t`` was changed in place; inference tensors have no version and count as 0."""
    return 0 if t.is_inference() else t._version


def _attributes(t: Tensor) -> dict[str, Any]:
    return dict(vars(t))


def _other(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() != before.keys() or any(now[k] is not before[k] for k in now)


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Returns true if two tensors have an element in common, or are too large to tell."""
    if one.layout is not torch.strided or one.untyped_storage()._cdata != two.untyped_storage()._cdata:
        return True
    sizes = [
        1 + t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        for t in (one, two)
    ]
    if not one.numel() or not two.numel():
        return False
    if max(sizes) > LARGE or one.dtype != two.dtype:
        return True
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        places = torch.zeros(max(sizes), dtype=torch.bool, device="cpu")
        places.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
        return bool(places.as_strided(two.shape, two.stride(), two.storage_offset()).any())


def _leads_to_tensors(value: Any) -> bool:
    """Returns true if ``value`` leads to a tensor that needs a gradient, or to a module."""
    stack, seen = [value], set[int]()
    while stack and len(seen) < MOST:
        each = stack.pop()
        if (
            each is None
            or isinstance(each, (*PLAIN, type, ModuleType, CodeType, FrameType))
            or id(each) in seen
        ):
            continue
        if isinstance(each, nn.Module) or (isinstance(each, Tensor) and each.requires_grad):
            return True
        seen.add(id(each))
        stack += _referents(each)
    return False


def _referents(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return []
    if isinstance(value, FunctionType):  # without its globals
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)
