"""Hooks of all modules, and hooks on tensors."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module

from launcher.parallel.model_state.deep_copy import filled
from launcher.parallel.model_state.python_state import library

KINDS: dict[str, tuple[str, ...]] = {
    "register_module_buffer_registration_hook": ("_global_buffer_registration_hooks",),
    "register_module_module_registration_hook": ("_global_module_registration_hooks",),
    "register_module_parameter_registration_hook": ("_global_parameter_registration_hooks",),
    "register_module_forward_pre_hook": ("_global_forward_pre_hooks",),
    "register_module_forward_hook": (
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
    ),
    "register_module_full_backward_pre_hook": ("_global_backward_pre_hooks",),
    "register_module_full_backward_hook": ("_global_backward_hooks",),
}
"""The functions that register global hooks, and torch's tables of what each has registered."""


@contextmanager
def hooked_for_all() -> Iterator[list[str]]:
    """Yields a list that has, on exit, the register functions that were called; their hooks are removed."""
    stores: dict[str, list[dict[int, Any]]] = {
        name: [vars(module)[kept] for kept in kinds] for name, kinds in KINDS.items()
    }
    before = {id(store): set(store) for each in stores.values() for store in each}
    called: list[str] = []
    try:
        yield called
    finally:
        for name, each in stores.items():
            new = [(store, key) for store in each for key in store.keys() - before[id(store)]]
            if new:
                called.append(name)
            for store, key in new:
                del store[key]


REGISTER = frozenset({torch.Tensor.register_hook})
DEEP = 4
"""Depth to which functions within functions are searched."""
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "COPY", "DUP_TOP")  # the last of `a.b += 1`


def uses_weights(hook: Any, depth: int = 0) -> bool:
    """Returns true if ``hook`` can reach a weight, a module to call, or a value computed from weights.

    A hook that only scales or counts gradients can reach none of these.
    """
    if depth > DEEP:
        return False
    if isinstance(hook, MethodType):
        own = isinstance(hook.__self__, nn.Module)
        names = _names(hook.__func__.__code__) if own else _names_of_methods(type(hook.__self__))
        return _attribute_leads_to_weight(hook.__self__, names, depth)
    if isinstance(hook, partial):
        given = (*hook.args, *hook.keywords.values())
        return uses_weights(hook.func, depth + 1) or any(_contains_weights(v, depth) for v in given)
    if not isinstance(hook, FunctionType):
        return _attribute_leads_to_weight(hook, _names_of_methods(type(hook)), depth)
    captured = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
    defaults = (*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values())
    return any(_contains_weights(v, depth) for v in defaults) or any(
        _leads_to_weight(cell.cell_contents, name, hook.__code__, depth)
        for name, cell in captured.items()
        if filled(cell)
    )


def pre_hook_uses_weights(module: nn.Module) -> bool:
    """Returns true if a hook that runs before the backward of ``module`` can reach a weight.

    Such a hook gets the module as its first argument.
    """
    each = module._backward_pre_hooks.values()
    own = (_reads(module, _names(h.__code__)) for h in each if isinstance(h, FunctionType))
    return any(own) or any(map(uses_weights, each))


def _leads_to_weight(value: Any, name: str, code: CodeType, depth: int) -> bool:
    """Returns true if the variable ``name`` of a function is a weight, or leads to one."""
    if isinstance(value, nn.Module):
        return _uses_object_itself(code, name) or _reads(value, _names(code))
    if _is_users(value):
        return _uses_object_itself(code, name) or _attribute_leads_to_weight(value, _names(code), depth)
    return _contains_weights(value, depth)


def _attribute_leads_to_weight(owner: Any, names: frozenset[str], depth: int) -> bool:
    """Returns true if one of the attributes ``names`` of ``owner`` is a weight, or leads to one."""
    if isinstance(owner, nn.Module):
        return _reads(owner, names)
    inside = getattr(owner, "__dict__", {})
    return any(_contains_weights(v, depth) for name, v in inside.items() if name in names)


def _contains_weights(value: Any, depth: int) -> bool:
    """Returns true for a weight, a module with weights, and whatever contains one of these."""
    if depth > DEEP:
        return False
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, nn.Module):
        return any(True for _ in value.parameters())
    if isinstance(value, list | tuple | set | dict):
        items = value.values() if isinstance(value, dict) else value
        return any(_contains_weights(v, depth + 1) for v in items)
    if isinstance(value, FunctionType | MethodType | partial):
        return uses_weights(value, depth + 1)
    return _is_users(value) and any(_contains_weights(v, depth + 1) for v in vars(value).values())


def _is_users(value: Any) -> bool:
    """Returns true for an object of the user's classes."""
    return hasattr(value, "__dict__") and not library(type(value).__module__)


def _reads(owner: Any, names: frozenset[str]) -> bool:
    """Returns true if one of the attributes ``names`` of ``owner`` is a weight or another module."""
    if not isinstance(owner, nn.Module):
        return False
    return bool(names & (owner._parameters.keys() | owner._modules.keys() | {"parameters", "forward"}))


def _uses_object_itself(code: CodeType, name: str) -> bool:
    """Returns true if ``code`` uses the object ``name`` itself, as in a call, and not only its attributes."""
    steps = list(dis.get_instructions(code))
    own = any(
        step.opname == "LOAD_DEREF" and step.argval == name and after.opname not in ATTRIBUTES
        for step, after in pairwise(steps)
    )
    return own or any(_uses_object_itself(c, name) for c in code.co_consts if isinstance(c, CodeType))


def _names_of_methods(kind: type) -> frozenset[str]:
    """Returns the names in the code of all methods of a class, which may call each other."""
    functions = [f for k in kind.__mro__ for f in vars(k).values() if isinstance(f, FunctionType)]
    return frozenset[str]().union(*(_names(f.__code__) for f in functions))


def _names(code: CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))
