"""Numbers tensors by how they were computed: equal numbers are equal values, in forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.dispatch.pytree import tree_leaves
from launcher.parallel.sharding.hidden_changes import written
from launcher.parallel.trace.capture import stream

COMMUTES = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)
COPIES = (torch.ops.aten.clone.default, torch.ops.aten.lift_fresh.default)


class ValueNumbers(Dispatch):
    """While entered, numbers every result, and every changed tensor, of operations on meta tensors.

    A number depends on the operation, its constants and the numbers of its inputs; random draws are counted.
    A storage has a number, and a tensor's number depends on that of its storage and on its place there.
    Changing all of a tensor in place gives the same number as making a new one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: dict[int, str] = {}
        self._alive: list[Any] = []  # a freed address could be reused
        self._draws = 0

    def name(self, t: Tensor, text: str) -> None:
        """Give the storage of ``t`` a number of its own."""
        self._put(t, _digest(text))

    def of(self, t: Tensor) -> str:
        """Return the number of a value."""
        storage = t.untyped_storage()
        if storage._cdata not in self._memory:
            self._put(t, _digest("unknown", len(self._memory)))
        lies = (t.dtype, t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.is_conj(), t.is_neg())
        return _digest(self._memory[storage._cdata], *lies)

    def _put(self, t: Tensor, number: str) -> None:
        storage = t.untyped_storage()
        if storage._cdata not in self._memory:
            self._alive.append(storage)
        self._memory[storage._cdata] = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # before it runs: the numbers of its inputs
        kwargs = dict(kwargs or {})
        taken = [self._numbered(a) for a in args]
        if func in COMMUTES and len(args) == 2 and not kwargs:
            taken.sort()
        named = sorted((name, self._numbered(a)) for name, a in kwargs.items())
        draw = self._drawn(func)
        whole = _digest(func.overloadpacket.__name__.removesuffix("_"), taken, named, draw)

        out = func(*args, **kwargs)

        # the changed tensors, and the new ones
        changed = written(func, args, kwargs)
        for n, t in enumerate(changed):
            storage = self._memory.get(t.untyped_storage()._cdata, "")
            lies = (t.storage_offset(), tuple(t.shape), tuple(t.stride()))
            self._put(t, _digest(whole, n) if _fills(t) else _digest(storage, *lies, whole, n))
        for n, t in enumerate(x for x in tree_leaves(out) if isinstance(x, Tensor)):
            if t.untyped_storage()._cdata not in self._memory:
                self._put(t, self._made(func, args, t) or _digest(whole, n))
        return out

    def _made(self, func: Any, args: Sequence[Any], made: Tensor) -> str:
        """Return the number of a full tensor for a copy of it, or ""."""
        if func not in COPIES or not (_fills(made) and _fills(args[0])) or made.stride() != args[0].stride():
            return ""
        return self._memory.get(args[0].untyped_storage()._cdata, "")

    def _drawn(self, func: Any) -> str:
        """Return a digest of the draw's number and of torch's stream, which meta tensors do not advance."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return ""
        self._draws += 1
        return _digest(self._draws, stream())

    def _numbered(self, arg: Any) -> str:
        if isinstance(arg, Tensor):
            return self.of(arg)
        if isinstance(arg, list | tuple):
            return f"[{','.join(map(self._numbered, arg))}]"
        return "generator" if isinstance(arg, torch.Generator) else repr(arg)


def _fills(t: Tensor) -> bool:
    """Whether ``t`` covers its storage, in order."""
    return t.is_contiguous() and t.numel() * t.itemsize == t.untyped_storage().nbytes()


def _digest(*what: Any) -> str:
    return blake2b(repr(what).encode(), digest_size=16).hexdigest()
