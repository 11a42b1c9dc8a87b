"""Finds tensor hooks that use weights in a backward, when a layout may have freed them."""

from __future__ import annotations

import dis
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

REGISTER = frozenset({torch.Tensor.register_hook})
DEEP = 4
"""Depth to which functions within functions are searched."""
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "COPY", "DUP_TOP")  # the last of `a.b += 1`


def uses_weights(hook: Any, depth: int = 0) -> bool:
    """Whether ``hook`` can reach a weight, a module to call, or a value that was computed from weights.

    A hook that only scales or counts gradients can reach none.
    """
    if isinstance(hook, MethodType):
        return _reads(hook.__self__, _names(hook.__func__.__code__))
    if not isinstance(hook, FunctionType) or depth > DEEP:
        return False
    held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
    return any(
        _weighs(cell.cell_contents, name, hook.__code__, depth) for name, cell in held.items() if _full(cell)
    )


def _weighs(value: Any, name: str, code: CodeType, depth: int) -> bool:
    """Whether the variable ``name`` of a function is a weight, or leads to one."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, nn.Module):
        return _hands_on(code, name) or _reads(value, _names(code))
    return uses_weights(value, depth + 1)


def _reads(owner: Any, names: frozenset[str]) -> bool:
    """Whether one of these attributes of ``owner`` is a weight or another module."""
    if not isinstance(owner, nn.Module):
        return False
    return bool(names & (owner._parameters.keys() | owner._modules.keys() | {"parameters", "forward"}))


def _hands_on(code: CodeType, name: str) -> bool:
    """Whether ``code`` uses the object ``name`` itself, such as in a call, and not only its attributes."""
    steps = list(dis.get_instructions(code))
    own = any(
        step.opname == "LOAD_DEREF" and step.argval == name and after.opname not in ATTRIBUTES
        for step, after in pairwise(steps)
    )
    return own or any(_hands_on(c, name) for c in code.co_consts if isinstance(c, CodeType))


def _names(code: CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
