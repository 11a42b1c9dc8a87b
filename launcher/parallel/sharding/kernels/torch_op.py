"""Finds torch's operator by name, and binds the arguments that are the same in every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.arguments import local_arguments
from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.plan.sharding.op_graph import Arg, Name, Ref

Run = Callable[..., Any]
"""Takes the tensors of an operator in order; returns what the operator returns."""


def torch_op(op: str) -> Any:
    """``add.Tensor`` -> ``torch.ops.aten.add.Tensor``."""
    space, found, name = op.rpartition("::")
    kind, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, space if found else "aten"), kind)
    return getattr(packet, overload or "default")


def own_op(call: LocalCall, device: torch.device) -> Run:
    """Return the operator itself, on parts."""
    op, args = local_arguments(call)
    if op == "copy":
        return _copy
    return bound(torch_op(op), args, dict(call.node.kwargs), device)


def _copy(x: Tensor, source: Tensor) -> Tensor:
    """``aten::copy``, with a gradient."""
    return torch.empty_like(x).copy_(source)


def bound(op: Any, args: Sequence[Arg], kwargs: dict[str, Arg], device: torch.device) -> Run:
    """Return ``op`` with all non-tensor arguments bound; it takes the tensors in order."""
    fixed = {key: constant(v, device) for key, v in kwargs.items() if not _tensors(v)}
    lead = next((i for i, a in enumerate(args) if not isinstance(a, Ref)), len(args))
    if len(fixed) == len(kwargs) and not any(_tensors(a) for a in args[lead:]):
        return _leading(op, lead, tuple(constant(a, device) for a in args[lead:]), fixed)

    template = [_template(a, device) for a in args]
    named = {key: _template(v, device) for key, v in kwargs.items() if key not in fixed}

    def run(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        filled = [_filled(a, rest) for a in template]
        return op(*filled, **{k: _filled(v, rest) for k, v in named.items()}, **fixed)

    return run


def _leading(op: Any, count: int, after: tuple[Any, ...], fixed: dict[str, Any]) -> Run:
    """Return the fast form for most operators: tensors first, then constants."""
    if not after and not fixed:
        return lambda *tensors: op(*tensors)
    return lambda *tensors: op(*tensors, *after, **fixed)


class _Tensor:
    """Marks the place of a tensor among arguments."""


def _template(arg: Arg, device: torch.device) -> Any:
    if isinstance(arg, Ref):
        return _Tensor
    if isinstance(arg, tuple) and _tensors(arg):
        return [_template(a, device) for a in arg]
    return constant(arg, device)


def _filled(template: Any, rest: Any) -> Any:
    if template is _Tensor:
        return next(rest)
    if isinstance(template, list):
        return [_filled(t, rest) for t in template]
    return template


def _tensors(arg: Arg) -> bool:
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(_tensors(a) for a in arg))


def constant(arg: Arg, device: torch.device) -> Any:
    """Return torch's value for an argument of a recording; every device becomes ``device``."""
    if isinstance(arg, tuple):
        return tuple(constant(a, device) for a in arg)
    if isinstance(arg, Name):
        space, _, name = arg.text.partition(".")
        return getattr(torch, name) if space == "torch" else device
    return arg


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
