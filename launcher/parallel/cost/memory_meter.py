"""Measures the peak bytes of all tensors alive while something runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from launcher.parallel.dispatch.modes import Dispatch
from launcher.parallel.dispatch.pytree import tree_leaves


class MemoryMeter(Dispatch):
    """Records in ``peak`` the most bytes in use at the end of any operation while entered.

    Counts every storage once, at its current size, because FSDP2 empties and refills storages without an
    operation. Memory that an operation needs inside is not counted; for CUDA use the allocator's statistics.
    ``before`` has the tensors that exist already.
    """

    kind = "real"
    run: Callable[[Any, Any, Any], Any] = staticmethod(lambda func, args, kwargs: func(*args, **kwargs))

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for t in before:
            self._see(t)

    @property
    def now(self) -> int:
        """Bytes in use now."""
        storages = [ref() for ref in list(self._alive.values())]
        return sum(s.nbytes() for s in storages if s is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.run(func, args, kwargs or {})
        for t in tree_leaves((args, kwargs, out)):
            if isinstance(t, torch.Tensor):
                self._see(t)
        if self.now > self.peak:
            self.settle()
            self.peak = max(self.peak, self.now)
        return out

    def settle(self) -> None:
        """Called before a new peak counts: a subclass may wait until other threads have freed memory."""

    def _see(self, t: torch.Tensor) -> None:
        inner = getattr(t, "_local_tensor", t)
        storage = inner.untyped_storage()
        key = storage._cdata
        mine = (storage.device.type == "meta") == (self.kind == "meta")
        if mine and (key not in self._alive or self._alive[key]() is not storage):
            self._alive[key] = weakref.ref(storage, partial(self._gone, key))

    def _gone(self, key: int, _: Any) -> None:
        self._alive.pop(key, None)
