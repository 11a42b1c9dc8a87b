"""Copies a model with the functions and hooks put on its modules, so that the original stays untouched."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

OURS = frozenset(vars(nn.Module()))
"""Attributes that torch has made."""

EMPTY = (dict, OrderedDict, set)
"""Most of what a module keeps is one of these with nothing in it; ``copy`` takes ten times as long for it."""
HOLDERS = (FunctionType, MethodType, partial, list, tuple, dict)
"""Attributes that are, or hold, functions."""


def copied(model: M) -> M:
    """As ``copy.deepcopy``, but functions that hold a module hold its copy, and not the original.

    What cannot be copied, as locks, open files and generators, both have.
    """
    values = [v for m in model.modules() for v in vars(m).values()]
    empty = {id(v): type(v)() for v in values if type(v) in EMPTY and not v}
    memo: dict[int, Any] = dict(empty)
    try:
        out = copy.deepcopy(model, memo)
    except Exception:  # whatever the user's object says of it
        memo = empty | _single(model)
        out = copy.deepcopy(model, memo)

    # functions and hooks, which deepcopy keeps as they are
    for module in out.modules():
        own = vars(module)
        own.update({k: _on_copy(v, memo) for k, v in own.items() if isinstance(v, HOLDERS)})
        for hooks in (own[name] for name in HOOKS):
            hooks.update({k: _on_copy(v, memo) for k, v in hooks.items()})
    return out


def _single(model: nn.Module) -> dict[int, Any]:
    """The attributes that cannot be copied, as deepcopy's memory of what it has copied."""
    out: dict[int, Any] = {}
    modules = {id(m): m for m in model.modules()}
    for module in modules.values():
        for value in [v for k, v in vars(module).items() if k not in OURS]:
            try:
                copy.deepcopy(value, modules | out)
            except Exception:
                out[id(value)] = value
    return out


def _on_copy(value: Any, memo: dict[int, Any]) -> Any:
    """``value`` with the copies of what it holds, if there are any; else ``value`` itself."""
    if id(value) in memo:
        return memo[id(value)]

    # what can be called
    if isinstance(value, MethodType):
        own, func = _on_copy(value.__self__, memo), _on_copy(value.__func__, memo)
        same = own is value.__self__ and func is value.__func__
        return value if same else MethodType(func, own)
    if isinstance(value, partial):
        return partial(_on_copy(value.func, memo), *_each(value.args, memo), **_named(value.keywords, memo))
    if isinstance(value, FunctionType):
        return _function(value, memo)

    # containers, which stay the same object if all that they hold does
    if type(value) is dict:
        named = _named(value, memo)
        return value if all(named[k] is v for k, v in value.items()) else named
    if type(value) in (tuple, list):
        each = _each(value, memo)
        return value if all(a is b for a, b in zip(each, value, strict=True)) else type(value)(each)
    return value


def _function(f: FunctionType, memo: dict[int, Any]) -> Any:
    """``f`` itself, or with cells of its own: it may count in them, or hold what has been copied."""
    memo[id(f)] = f  # it may hold itself
    own = (f.__module__ or "").partition(".")[0] not in ("launcher", "torch")  # ours tell whoever made them

    # what the copy would hold in its cells and defaults, and whether that is anything else
    copy_cell = _fresh if own else _on_copy
    new = {id(c): copy_cell(c.cell_contents, memo) for _, c in cells(f)}
    defaults = _each(f.__defaults__ or (), memo)
    named = _named(f.__kwdefaults__ or {}, memo)
    held = [(new[id(c)], c.cell_contents) for _, c in cells(f)]
    changed = any(now is not was or (own and _counts(was)) for now, was in held)
    changed |= any(a is not b for a, b in zip(defaults, f.__defaults__ or (), strict=True))
    changed |= any(named[k] is not v for k, v in (f.__kwdefaults__ or {}).items())
    if not changed:
        return f

    closure = tuple(_cell(c, new, memo) for c in f.__closure__ or ())
    made = FunctionType(f.__code__, f.__globals__, f.__name__, tuple(defaults) or None, closure)
    made.__kwdefaults__ = named or None
    made.__dict__ = dict(vars(f))
    memo[id(f)] = made
    return made


def _cell(cell: CellType, new: dict[int, Any], memo: dict[int, Any]) -> CellType:
    """One for all functions that share ``cell``; ``memo`` keeps what it is known by alive."""
    if id(cell) not in new:
        return cell
    made, _ = memo.setdefault(id(cell), (CellType(new[id(cell)]), cell))
    return made  # type: ignore[no-any-return]


def _fresh(value: Any, memo: dict[int, Any]) -> Any:
    """What a function's own copy holds."""
    made = _on_copy(value, memo)
    if made is not value or not _counts(value):
        return made
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # as with attributes, both have it
        return value


def _counts(value: Any) -> bool:
    """Whether a function may change ``value`` that it holds, or put another in its place."""
    return not isinstance(value, nn.Module | torch.Tensor | ModuleType | type) and not callable(value)


def cells(f: FunctionType) -> list[tuple[str, CellType]]:
    """What ``f`` holds of the functions around it, by name."""
    each = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    return [(name, cell) for name, cell in each if name != "__class__" and _full(cell)]


def _each(values: Any, memo: dict[int, Any]) -> list[Any]:
    return [_on_copy(v, memo) for v in values]


def _named(values: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    return {k: _on_copy(v, memo) for k, v in values.items()}


def _full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # it is filled later
        return False
