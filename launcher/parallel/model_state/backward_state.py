"""Finds state that a backward changes, as a counting hook does: a pipeline runs other forwards before it."""

from __future__ import annotations

from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from launcher.parallel.dispatch.containers import mapped
from launcher.parallel.dispatch.modes import default_dtype
from launcher.parallel.dispatch.pytree import tree_leaves
from launcher.parallel.model_state.python_state import changed, held, library

HOOKING = frozenset({"apply", "register_hook", "register_multi_grad_hook", "register_prehook"})
"""Names in the code of a module that may have something of its own run in the backward."""


def moved(name: str, leaf: nn.Module, args: Any, kwargs: Any) -> list[str]:
    """The attributes and buffers of ``leaf`` that the backward of a call changes; both run, on meta tensors.

    Nothing is known of one that looks at data.
    """
    if not any(map(_hooks, leaf.modules())):
        return []

    # whatever a hook says of tensors without numbers
    with suppress(Exception), default_dtype(torch.float32), torch.device("meta"):
        # a call
        args, kwargs = mapped((args, kwargs), _fresh)
        made = tree_leaves(leaf(*args, **kwargs))
        out = [t for t in made if isinstance(t, torch.Tensor) and t.requires_grad]

        # its backward, which leaves no gradient behind
        before, versions = held(leaf), _versions(leaf)
        torch.autograd.backward(out, [torch.empty_like(t) for t in out])
        leaf.zero_grad(set_to_none=True)

        # what is another object now, or the same with other numbers
        found = [at for at, _ in changed(before, held(leaf))]
        found += [at for at, version in _versions(leaf).items() if versions.get(at) != version]
        return [f"{name}.{at}" for at in dict.fromkeys(found)]
    return []


def _hooks(module: nn.Module) -> bool:
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    kinds = [k for k in type(module).__mro__ if not library(k.__module__)]
    functions = [f for k in kinds for f in vars(k).values() if isinstance(f, FunctionType)]
    return any(HOOKING & _names(f.__code__) for f in functions)


def _names(code: CodeType) -> frozenset[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*inner)


def _fresh(t: torch.Tensor) -> torch.Tensor:
    """As an input of which a gradient is asked for, and which may be changed in place."""
    out = torch.empty_like(t, device="meta")
    return out.requires_grad_().clone() if out.is_floating_point() or out.is_complex() else out


def _versions(leaf: nn.Module) -> dict[str, int]:
    return {at: b._version for at, b in leaf.named_buffers() if not b.is_inference()}
