"""Counts what one forward costs while it runs on meta tensors: kernels, FLOPs, bytes kept for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.flop_counter import flop_registry

from launcher.parallel.cost.fused_kernels import FusedKernels
from launcher.parallel.cost.kernel_dtypes import disagreement
from launcher.parallel.cost.operations_meter import OperationsMeter
from launcher.parallel.cost.saved_hooks import SavedHooks
from launcher.parallel.dispatch import meta_cache
from launcher.parallel.dispatch.containers import tensors
from launcher.parallel.dispatch.modes import Dispatch


class _Flops(Dispatch):
    """Adds up the flops of products, convolutions and attention, as torch's counter, without module hooks."""

    def __init__(self, hooks: SavedHooks, keep: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.hooks = hooks
        self.keep = keep
        self.total = 0
        self.operations = OperationsMeter()
        self.written: set[int] = set()
        self.disagree: dict[str, None] = {}
        self.seen: Callable[[Any], None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.seen is not None:
            self.seen(func)
        found = disagreement(func, args)
        if found:
            self.disagree[found] = None

        out = meta_cache.run(func, args, kwargs)

        # what it keeps if no hook sees that, what it writes, and what it costs
        if self.hooks.aside:
            for t in tensors((args, kwargs, out)):
                self.keep(t)
        if func._schema.is_mutable:
            self._writes(func, args, kwargs)
        self.total += flops_of(func, args, kwargs, out)
        self.operations.see(func, args, kwargs, out)
        return out

    def _writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for at, a in enumerate(func._schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                value = args[at] if at < len(args) else kwargs.get(a.name)
                found = value if isinstance(value, list | tuple) else (value,)
                self.written |= {t.untyped_storage()._cdata for t in found if isinstance(t, torch.Tensor)}


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the flops of one ATen operation, as torch's counter: of products, convolutions and attention."""
    if func._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention(*(t.shape for t in args[:3]))
    count = flop_registry.get(func._overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def _attention(q: torch.Size, k: torch.Size, v: torch.Size) -> int:
    """Return the flops of attention for shapes (batch, heads, length, width).

    Keys and values may have fewer heads, which torch counts only since 2.13.
    """
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


class Meter:
    """Counts while entered; ``flops`` and ``saved`` (bytes) are running totals.

    A storage counts once however often it is saved; parameters and buffers (``own``) do not count. ``kept``
    has all saved storages, including those of ``own``; ``written`` has the storages that operations have
    changed in place. Under torch.func.grad, where torch does not report what is saved, every tensor that
    passes through an operation counts as saved.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self.saved = 0
        self.kept: set[int] = set()
        self._seen: set[int] = set()
        self._alive: list[torch.Tensor] = []  # the address of a freed storage could be reused by another
        self._hooks = SavedHooks(self._keep)
        self._flops = _Flops(self._hooks, self._keep)
        self._fused = FusedKernels()
        self.own(own)

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude parameters and buffers from the count."""
        for t in tensors:
            self._seen.add(t.untyped_storage()._cdata)
            self._alive.append(t)

    def mark(self) -> Callable[[], None]:
        """Return a function that resets the totals to their present values."""
        saved, flops, began = self.saved, self._flops.total, self.operations.mark()

        def back() -> None:
            self.saved, self._flops.total = saved, flops
            self.operations.forget(began)

        return back

    @property
    def written(self) -> set[int]:
        return self._flops.written

    @property
    def disagree(self) -> tuple[str, ...]:
        """Operations on tensors of several dtypes that only the meta device supports."""
        return tuple(self._flops.disagree)

    def tell(self, seen: Callable[[Any], None]) -> None:
        """Call ``seen`` with every operation from now on."""
        self._flops.seen = seen

    @property
    def flops(self) -> int:
        return self._flops.total

    @property
    def operations(self) -> OperationsMeter:
        return self._flops.operations

    def _keep(self, t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        self.kept.add(storage._cdata)
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(t.detach())
            self.saved += storage.nbytes()
        return t

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        self._flops.__enter__()
        self._fused.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._fused.__exit__(kind, error, at)
        self._flops.__exit__(kind, error, at)
        self._hooks.__exit__(kind, error, at)
