"""The base class of dispatch modes that observe a forward, and functions that these modes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from launcher.parallel.dispatch.containers import repacked
from launcher.plan.values.model_graph import DUAL


class Dispatch(TorchDispatchMode):
    """A dispatch mode without torch's guard that keeps dynamo out of its code.

    The guard would import torch._dynamo, which takes a second per plan.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns true if an operator draws random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for n, a in enumerate(func._schema.arguments):
        if a.name in ("dropout", "dropout_p"):
            return bool(args[n] if n < len(args) else kwargs.get(a.name, a.default_value))
    return True


def batched(t: Any) -> bool:
    """Returns true if ``torch.vmap`` or another transform wraps ``t``: it has no memory, no use outside."""
    return isinstance(t, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t)


def sparse_parts(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors with the indices and the values of a sparse tensor, if its layout has them."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        if t.layout is torch.sparse_coo:
            return t._indices(), t._values()
        if t.layout in (torch.sparse_csr, torch.sparse_bsr):
            return t.crow_indices(), t.col_indices(), t.values()
        if t.layout in (torch.sparse_csc, torch.sparse_bsc):
            return t.ccol_indices(), t.row_indices(), t.values()
    return ()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets the dtype of new floating-point tensors for the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


PLAIN_TYPES = frozenset(
    {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device}
)
"""Common classes of leaves, which are recognized without a look at torch's registry of containers."""


def tree_leaves(tree: Any) -> list[Any]:
    """Returns all values that are not containers, in order."""
    out: list[Any] = []
    _gather(tree, out)
    return out


def _gather(value: Any, out: list[Any]) -> None:
    kind = type(value)
    if kind in PLAIN_TYPES:
        out.append(value)
    elif kind is tuple or kind is list:
        for some in value:
            _gather(some, out)
    elif kind is dict:
        for some in value.values():
            _gather(some, out)
    else:
        out += _pytree.tree_leaves(value)


def tree_map_only(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a copy of ``tree`` with ``change`` applied to the leaves of class ``kind``."""
    mine = type(tree)
    if mine in PLAIN_TYPES:
        return change(tree) if isinstance(tree, kind) else tree
    if mine is tuple:
        return tuple([tree_map_only(kind, change, some) for some in tree])
    if mine is list:
        return [tree_map_only(kind, change, some) for some in tree]
    if mine is dict:
        return {key: tree_map_only(kind, change, some) for key, some in tree.items()}
    if isinstance(tree, PackedSequence):
        return repacked(tree, change) if issubclass(torch.Tensor, kind) else tree
    return _pytree.tree_map_only(kind, change, tree)


OURS = ("torch", "launcher")
"""Packages whose modes and replaced functions are not the user's."""

PLACES: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.Tensor", torch.Tensor),
    ("torch.nn.functional", functional),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
)
"""The modules and classes of torch whose functions compute with tensors, by their paths."""


class Surroundings:
    """A record of what a call of a module depends on besides its arguments and state.

    It contains the active modes, the dual level, the functions of torch, and the forwards of the model's
    classes, all as they are when the record is made.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modes = _modes()
        self._forwards = {kind: kind.forward for kind in {type(m) for m in model.modules()}}
        self._functions = [
            {k: v for k, v in vars(place).items() if callable(v) and not isinstance(v, type)}
            for _, place in PLACES
        ]
        self._known = {id(value) for functions in self._functions for value in functions.values()}
        self._level = forward_ad._current_level

    def entered(self) -> str:
        """Describes what the user's code has entered or replaced since the record was made; "" if nothing."""
        for mode in _modes():
            if _is_users(type(mode)) and all(mode is not m for m in self._modes):
                return f"the mode {type(mode).__name__}"
        if forward_ad._current_level > self._level:
            return DUAL
        for kind, forward in self._forwards.items():
            if kind.forward is not forward:
                return f"another forward of {kind.__name__}"
        for (path, place), before in zip(PLACES, self._functions, strict=True):
            here = vars(place)
            if all(map(is_, map(here.get, before), before.values())):  # fast, and nearly always true
                continue
            for name, was in before.items():
                now = here.get(name, was)
                if now is not was and (_is_users(now) or id(now) in self._known):
                    return f"another function in the place of {path}.{name}"
        return ""


def _is_users(what: Any) -> bool:
    return (getattr(what, "__module__", None) or "torch").partition(".")[0] not in OURS


def _modes() -> list[Any]:
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
