"""The functions that a module's code can call, and whether one of them registers hooks of the backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from launcher.parallel.model_state.deep_copy import TORCH_ATTRIBUTES, cells, hooks
from launcher.parallel.model_state.library_attributes import imported
from launcher.parallel.model_state.python_state import PLAIN, library

HOOKING = frozenset(
    {
        "apply", "checkpoint", "grad", "ops", "register_hook", "register_multi_grad_hook",
        "register_post_accumulate_grad_hook", "register_prehook", "retain_grad", "saved_tensors_hooks",
    }
)  # fmt: skip
"""Names in code that may let its own code run in the backward, or read a gradient that it left."""
RUNS_CODE_LATER = ("torch.autograd.graph", "torch.utils.checkpoint", CustomOpDef.__module__)
"""Modules of torch that call a model's code in the backward; they may have other names in its files."""

MOST = 10_000
_OF_CLASSES: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def hooks_backward(module: nn.Module) -> bool:
    """Returns true if ``module``, without its parts, may register hooks, or call a Function of the user's.

    What its code refers to is searched too: functions, objects of the user's classes, and modules of Python.
    """
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    if any(p is not None and hooks(p) for p in module._parameters.values()):
        return True
    kind = type(module)
    if kind not in _OF_CLASSES:
        _OF_CLASSES[kind] = _leads_to_hooks([kind])
    if _OF_CLASSES[kind]:
        return True
    values = [v for name, v in vars(module).items() if name not in TORCH_ATTRIBUTES]
    return _leads_to_hooks([*values, *module._forward_hooks.values(), *module._forward_pre_hooks.values()])


def _leads_to_hooks(starts: list[Any]) -> bool:
    """Returns true if one of these objects, or one that it refers to, lets code run in the backward."""
    for value in reachable(starts, lambda name: library(name) and name not in RUNS_CODE_LATER):
        if isinstance(value, type):
            if issubclass(value, Function | saved_tensors_hooks | CustomOpDef):
                return True
        elif HOOKING & _names(value.__code__):
            return True
    return False


def _none(value: Any) -> bool:
    return False


def reachable(
    starts: Iterable[Any], foreign: Callable[[str], bool], left_out: Callable[[Any], bool] = _none
) -> Iterator[FunctionType | type]:
    """Yields the functions and classes among ``starts``, and what their code refers to, also by imports.

    ``foreign``: whether a Python module of this name is left out. ``left_out``: whether an object is.
    """
    queue, seen = list(starts), set[int]()
    while queue and len(seen) < MOST:
        value = queue.pop()
        if id(value) in seen or isinstance(value, (*PLAIN, nn.Module, torch.Tensor)) or left_out(value):
            continue
        seen.add(id(value))
        if isinstance(value, MethodType) and isinstance(value.__self__, type):
            value = value.__self__  # such as the apply of a Function, under another name
        if isinstance(value, FunctionType | type) and not foreign(value.__module__ or "torch"):
            yield value
        if isinstance(value, FunctionType) and not foreign(value.__module__ or "torch"):
            queue += _referred(value, foreign)
        else:
            queue += _parts(value, foreign)


def imports(function: FunctionType) -> Iterator[str]:
    """Yields the names of the Python modules that ``function`` may import when it runs, existing or not."""
    package = function.__globals__.get("__package__") or ""
    for name in sorted(imported([function])):
        yield name
        if package:
            yield f"{package}.{name}".strip(".")


def _referred(function: FunctionType, foreign: Callable[[str], bool]) -> Iterator[Any]:
    """Yields the objects that the code of ``function`` refers to."""
    names = _names(function.__code__)
    values = [function.__globals__.get(name) for name in names]
    values += [sys.modules.get(name) for name in imports(function)]
    for value in values:
        if isinstance(value, ModuleType):
            if not foreign(value.__name__):
                yield from (vars(value)[n] for n in names if n in vars(value))
        elif value is not None:
            yield value
    yield from (cell.cell_contents for _, cell in cells(function))
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from vars(function).values()


def _parts(value: Any, foreign: Callable[[str], bool]) -> list[Any]:
    """Returns what an object refers to, as far as it is the user's."""
    if isinstance(value, type):
        kinds = [k for k in value.__mro__ if not foreign(k.__module__)]
        return [v for k in kinds for v in vars(k).values()]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [f for f in (value.fget, value.fset) if f is not None]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    wrapped: Callable[..., Any] | None = getattr(value, "__wrapped__", None) if callable(value) else None
    if wrapped is not None:
        return [wrapped]
    return [] if foreign(type(value).__module__) else [type(value), *getattr(value, "__dict__", {}).values()]


@cache
def _names(code: CodeType) -> frozenset[str]:
    """Returns the names in ``code``, and its texts, which may be names of attributes."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union((c for c in code.co_consts if isinstance(c, str)), *inner)
