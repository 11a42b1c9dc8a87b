"""Copies models together with their hooks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import CallableProxyType, ProxyType, WeakKeyDictionary, WeakSet, WeakValueDictionary, proxy, ref

import torch
from torch import nn
from torch.utils import swap_tensors

from launcher.user_errors import owned

M = TypeVar("M", bound=nn.Module)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes of a module that torch itself defines."""

EMPTY = (dict, OrderedDict, set)
"""Most attributes are empty containers of these types, and ``copy`` takes far longer than making new ones."""
PLAIN = (torch.Tensor, nn.Parameter)
PROXIES = (ProxyType, CallableProxyType)
WEAK = (WeakKeyDictionary, WeakValueDictionary, WeakSet)
HOLDERS = (FunctionType, MethodType, partial, list, tuple, dict, ref, *WEAK, *PROXIES)
"""Types of attributes that are functions or weak references, or may contain some."""


def copied(model: M, parameter_hooks: bool = False, memo: Mapping[int, Any] | None = None) -> M:
    """Copies as ``copy.deepcopy`` does, but functions that refer to a module refer to its copy.

    Attributes that cannot be copied, such as locks, open files and generators, are shared. The parameters of
    the copy have no hooks, unless ``parameter_hooks``: most copies only run forwards. ``memo`` maps the ids
    of some objects to their replacements. Raises ``RequestError`` for modules that cannot be copied.
    """
    values = [v for m in model.modules() for v in vars(m).values()]
    empty = {id(v): type(v)() for v in values if type(v) in EMPTY and not v}
    empty |= {id(v): v for v in values if type(v) in PROXIES}  # deepcopy would copy the object behind a proxy
    empty |= memo or {}
    memo = dict(empty)
    try:
        out = copy.deepcopy(model, memo)
    except Exception:  # the user's object may raise anything
        memo = empty | _single(model)
        with owned("model", f"{type(model).__name__}: planning copies it with copy.deepcopy, which fails"):
            out = copy.deepcopy(model, memo)

    # functions and hooks, which deepcopy does not copy
    for module in out.modules():
        own = vars(module)
        own.update({k: _on_copy(v, memo) for k, v in own.items() if isinstance(v, HOLDERS)})
        for registered in (own[name] for name in HOOKS):
            registered.update({k: _on_copy(v, memo) for k, v in registered.items()})
    for p in filter(hooks, model.parameters() if parameter_hooks else ()):
        for hook in (p._backward_hooks or {}).values():
            memo[id(p)].register_hook(_on_copy(hook, memo))
        after: Any = p._post_accumulate_grad_hooks or {}
        for hook in after.values():
            memo[id(p)].register_post_accumulate_grad_hook(_on_copy(hook, memo))
    return out


def on_meta(model: M) -> M:
    """Copies a model to the meta device; its tensors are not copied in memory first."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if type(t) in PLAIN}
    memo: dict[int, Any] = {}
    for key, t in tensors.items():
        new = t.detach().to("meta")
        memo[key] = nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
    return copied(model, memo=memo).to("meta")


def _single(model: nn.Module) -> dict[int, Any]:
    """Returns the attributes that cannot be copied, as a memo for deepcopy."""
    out: dict[int, Any] = {}
    modules = {id(m): m for m in model.modules()}
    for module in modules.values():
        for value in [v for k, v in vars(module).items() if k not in TORCH_ATTRIBUTES]:
            try:
                copy.deepcopy(value, modules | out)
            except Exception:
                out[id(value)] = value
    return out


def _on_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Returns ``value`` with copies of the objects that it refers to, or itself if it refers to none."""
    if type(value) in PROXIES:
        target = behind(value)
        return proxy(memo[id(target)]) if id(target) in memo else value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, ref):
        target = value()
        made = None if target is None else _on_copy(target, memo)
        return value if made is target else type(value)(made)

    # callables
    if isinstance(value, MethodType):
        own, func = _on_copy(value.__self__, memo), _on_copy(value.__func__, memo)
        same = own is value.__self__ and func is value.__func__
        return value if same else MethodType(func, own)
    if isinstance(value, partial):
        return partial(_on_copy(value.func, memo), *_each(value.args, memo), **_named(value.keywords, memo))
    if isinstance(value, FunctionType):
        return _function(value, memo)

    # containers, which stay the same object if all of their items do
    if type(value) is dict:
        named = {_key_on_copy(k, memo): _on_copy(v, memo) for k, v in value.items()}
        return value if all(named.get(k) is v for k, v in value.items()) else named
    if type(value) is WeakSet:
        return WeakSet(_each(value, memo))
    if type(value) in (WeakKeyDictionary, WeakValueDictionary):
        return type(value)({_on_copy(k, memo): _on_copy(v, memo) for k, v in value.items()})
    if type(value) in (tuple, list):
        each = _each(value, memo)
        return value if all(a is b for a, b in zip(each, value, strict=True)) else type(value)(each)
    return value


def _key_on_copy(key: Any, memo: dict[int, Any]) -> Any:
    """Returns the key in a copied dictionary for ``key``, which may be the id of a module or a tensor."""
    made = memo.get(key) if type(key) is int else None
    return id(made) if isinstance(made, nn.Module | torch.Tensor) else key


def behind(value: Any) -> Any:
    """Returns the object that a weak proxy stands for, or ``None`` if it is gone; anything else as it is."""
    if type(value) not in PROXIES:
        return value
    try:
        return value.__repr__.__self__
    except ReferenceError:
        return None


def _function(f: FunctionType, memo: dict[int, Any]) -> Any:
    """Returns ``f``, or a copy with its own cells if it may change them or refers to copied objects."""
    memo[id(f)] = f  # it may refer to itself

    # functions of launcher and torch report to the object that made them: copies share what their cells have
    own = (f.__module__ or "").partition(".")[0] not in ("launcher", "torch")

    # the content of the copy's cells and defaults, and whether it differs
    copy_cell = _fresh if own else _on_copy
    new = {id(c): copy_cell(c.cell_contents, memo) for _, c in cells(f)}
    defaults = _each(f.__defaults__ or (), memo)
    named = _named(f.__kwdefaults__ or {}, memo)
    contents = [(new[id(c)], c.cell_contents) for _, c in cells(f)]
    changed = any(now is not was or (own and _may_change(was)) for now, was in contents)
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
    """Returns one new cell for all functions that share ``cell``; ``memo`` keeps ``cell`` alive."""
    if id(cell) not in new:
        return cell
    made, _ = memo.setdefault(id(cell), (CellType(new[id(cell)]), cell))
    return made  # type: ignore[no-any-return]


def _fresh(value: Any, memo: dict[int, Any]) -> Any:
    """Returns the value for the cell of a copied function."""
    made = _on_copy(value, memo)
    if made is not value or not _may_change(value):
        return made
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # it is shared, as attributes that cannot be copied are
        return value


def _may_change(value: Any) -> bool:
    """Returns true if a function may change ``value`` in its cell, or replace it."""
    return not isinstance(value, nn.Module | torch.Tensor | ModuleType | type) and not callable(value)


def cells(f: FunctionType) -> list[tuple[str, CellType]]:
    """Returns the variables that ``f`` closes over, by name."""
    each = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    return [(name, cell) for name, cell in each if name != "__class__" and filled(cell)]


def _each(values: Any, memo: dict[int, Any]) -> list[Any]:
    return [_on_copy(v, memo) for v in values]


def _named(values: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    return {k: _on_copy(v, memo) for k, v in values.items()}


def filled(cell: CellType) -> bool:
    """Returns true if the variable of a closure has a value, other than its own cell."""
    try:
        return cell.cell_contents is not cell
    except ValueError:  # it is filled later
        return False


def hooks(p: nn.Parameter) -> bool:
    """Returns true if a hook is registered on ``p``."""
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def keep(before: nn.Parameter, now: nn.Parameter) -> None:
    """Gives ``before`` the content of ``now``; its hooks stay. Other code may refer to this very object."""
    if before is now:
        return
    each = list((before._backward_hooks or {}).values())
    after: list[Any] = list((before._post_accumulate_grad_hooks or {}).values())
    before._backward_hooks = None
    before._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    swap_tensors(before, now)
    for hook in each:
        before.register_hook(hook)
    for hook in after:
        before.register_post_accumulate_grad_hook(hook)
