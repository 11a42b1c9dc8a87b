"""torch's pytree with a fast path for the tuples, lists and dicts that nearly all arguments are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

PLAIN = frozenset(
    {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device}
)
"""Common classes of leaves."""


def tree_leaves(tree: Any) -> list[Any]:
    """Return all values that are no containers, in order."""
    out: list[Any] = []
    _gather(tree, out)
    return out


def _gather(value: Any, out: list[Any]) -> None:
    kind = type(value)
    if kind in PLAIN:
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
    """Return a copy of ``tree`` with ``change`` applied to the leaves of class ``kind``."""
    mine = type(tree)
    if mine in PLAIN:
        return change(tree) if isinstance(tree, kind) else tree
    if mine is tuple:
        return tuple([tree_map_only(kind, change, some) for some in tree])
    if mine is list:
        return [tree_map_only(kind, change, some) for some in tree]
    if mine is dict:
        return {key: tree_map_only(kind, change, some) for key, some in tree.items()}
    return _pytree.tree_map_only(kind, change, tree)
