"""Base of the dispatch modes that observe a forward, with cached metadata."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from launcher.parallel.dispatch.containers import repacked


class Dispatch(TorchDispatchMode):
    """A dispatch mode that is never compiled.

    Saying so avoids the import of torch._dynamo, a second per plan.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for n, a in enumerate(func._schema.arguments):
        if a.name in ("dropout", "dropout_p"):
            return bool(args[n] if n < len(args) else kwargs.get(a.name, a.default_value))
    return True


def batched(t: Any) -> bool:
    """Whether ``t`` is a wrapper of ``torch.vmap`` and its like, which has no memory and no use outside."""
    return isinstance(t, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t)


def sparse_parts(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with the indices and the values of a sparse tensor, if its layout has them."""
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
    """Give new floating-point tensors ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


PLAIN_TYPES = frozenset(
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
    """Return a copy of ``tree`` with ``change`` applied to the leaves of class ``kind``."""
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


OUTSIDE = (torch.__file__.rpartition("__init__")[0], __file__.rpartition("parallel")[0])
"""Paths of code that is not the user's."""


def of_error(error: BaseException) -> str:
    """Return the user's file and line that raised ``error``, or "" if there is none."""
    return _last(traceback.extract_tb(error.__traceback__))


def of_now() -> str:
    """Return the user's file and line that is running, or ""."""
    return _last(traceback.extract_stack())


def _last(frames: traceback.StackSummary) -> str:
    mine = [f for f in frames if not f.filename.startswith((*OUTSIDE, "<"))]
    if not mine:
        return ""
    last = mine[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}"


Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
META = torch.device("meta")
KINDS = (torch.Tensor, torch.nn.Parameter)
VALUES = frozenset({
    int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
MOST_KNOWN = 10_000

_known: dict[Any, Spec | tuple[Spec, ...]] = {}


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return ``func(*args, **kwargs)``; meta tensors come from the cache if the same call was made before.

    Only operations whose results are new tensors, each with its own memory, are cached.
    """
    key = None if _opaque(func) else _key(func, args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    specs = _known.get(key)
    if not specs:
        out = func(*args, **kwargs)
        if specs is None and len(_known) < MOST_KNOWN:
            _known[key] = _fresh(out, args, kwargs)
        return out
    if isinstance(specs[0], torch.Size):
        return _made(specs)
    return tuple([_made(s) for s in specs])


def _made(spec: Any) -> torch.Tensor:
    shape, stride, dtype = spec
    return torch.empty_strided(shape, stride, dtype=dtype, device=META)


@cache
def _opaque(func: Any) -> bool:
    """Whether ``func`` writes to or returns a view of its arguments, or is no ATen operation.

    The results of a user-defined operation may depend on anything.
    """
    returned = any(r.alias_info is not None for r in func._schema.returns)
    return returned or func._schema.is_mutable or func.namespace != "aten"


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return everything that the shapes of the result depend on, or ``None`` if that is not known."""
    if torch._C._functorch.maybe_current_level() is not None:
        return None
    parts = [func, torch.get_default_dtype()]
    if not _add(parts, args) or not _add(parts, kwargs) or len(parts) <= 2:
        return None
    return tuple(parts)


def _add(parts: list[Any], value: Any) -> bool:
    """Add ``value`` to the key: a tensor as its shape, a number with its type. ``False`` if it has no key."""
    kind = type(value)
    if kind in KINDS:
        if not value.is_meta or value.layout is not torch.strided:
            return False
        if value.is_conj() or value.is_neg():
            return False
        parts.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        return True

    # plain values, with their types: 1, 1.0 and True are equal
    if kind in VALUES:
        parts.append((kind, value))
        return True

    # containers of these
    if kind is tuple or kind is list or kind is torch.Size:
        parts.append(len(value))
        return all(_add(parts, some) for some in value)
    if kind is dict:
        parts.append(tuple(value))
        return all(_add(parts, some) for some in value.values())
    return False


def _fresh(out: Any, args: Any, kwargs: Any) -> Any:
    """Return the specs of ``out``, or nothing unless each of its tensors is new and alone in its memory."""
    made = (out,) if type(out) is torch.Tensor else out
    if type(made) is not tuple or not made or not all(map(_bare, made)):
        return ()
    storages = {
        t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
    }
    mine = {t.untyped_storage()._cdata for t in made}
    if len(mine) < len(made) or mine & storages or any(map(_odd, made)):
        return ()
    specs = tuple((t.shape, t.stride(), t.dtype) for t in made)
    return specs[0] if made[0] is out else specs


def _bare(t: Any) -> bool:
    """Whether ``t`` is a dense meta tensor, of no subclass."""
    return type(t) is torch.Tensor and t.is_meta and t.layout is torch.strided


def _odd(t: torch.Tensor) -> bool:
    """Whether ``empty_strided`` makes a tensor that differs from ``t``."""
    like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META)
    same = t.storage_offset() == 0 and t.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    return not same or t.is_conj() or t.is_neg() or t.requires_grad
