"""Runs operations on meta tensors, and remembers the shapes of what they return."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from launcher.parallel.dispatch.modes import tree_leaves

Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
META = torch.device("meta")
KINDS = (torch.Tensor, torch.nn.Parameter)
VALUES = frozenset({
    int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
MOST_KNOWN = 10_000
_known: dict[Any, Spec | tuple[Spec, ...]] = {}


def run_cached(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns ``func(*args, **kwargs)``; meta tensors come from the cache if the same call was made before.

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
    """Returns true if ``func`` writes its arguments, returns a view of them, or is not an ATen operation.

    The results of a user-defined operation may depend on anything.
    """
    returned = any(r.alias_info is not None for r in func._schema.returns)
    return returned or func._schema.is_mutable or func.namespace != "aten"


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns everything that the shapes of the result depend on, or ``None`` if that is not known."""
    if torch._C._functorch.maybe_current_level() is not None:
        return None
    parts = [func, torch.get_default_dtype()]
    if not _add(parts, args) or not _add(parts, kwargs) or len(parts) <= 2:
        return None
    return tuple(parts)


def _add(parts: list[Any], value: Any) -> bool:
    """Adds ``value`` to the key, a tensor as its shape, a number with its type; false if it cannot."""
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
    """Returns the specs of ``out``, or ``()`` if one of its tensors is not new or shares memory."""
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
    """Returns true if ``t`` is a dense meta tensor and not of a subclass."""
    return type(t) is torch.Tensor and t.is_meta and t.layout is torch.strided


def _odd(t: torch.Tensor) -> bool:
    """Returns true if ``empty_strided`` makes a tensor that differs from ``t``."""
    like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META)
    same = t.storage_offset() == 0 and t.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    return not same or t.is_conj() or t.is_neg() or t.requires_grad
