"""FLOPs and bytes of the operations of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from launcher.parallel.cost.saved_hooks import SavedHooks
from launcher.parallel.dispatch import meta_shapes, user_lines
from launcher.parallel.dispatch.containers import tensors
from launcher.parallel.dispatch.modes import Dispatch, sparse_parts
from launcher.plan.values.operations import Operations, Product, total

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
BACKWARD = 2.5
"""Flops of a flash attention's backward per flop of its forward: five matrix products against two."""
PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
FREE = frozenset({
    aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.lift_fresh,
})  # fmt: skip


class OperationsMeter:
    """Records operations, and adds up those since a ``mark``."""

    def __init__(self) -> None:
        self._seen: list[Operations] = []

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes one operation and what it returned."""
        operations = operations_of(func, args, kwargs, out)
        if operations is not None:
            self._seen.append(operations)

    def mark(self) -> int:
        """Returns a mark for ``since`` and ``forget``."""
        return len(self._seen)

    def since(self, mark: int) -> Operations:
        return total(self._seen[mark:])

    def forget(self, mark: int) -> None:
        """Drops all operations since ``mark``."""
        del self._seen[mark:]


def operations_of(func: Any, args: Any, kwargs: Any, out: Any) -> Operations | None:
    """Returns the work of one operation, or ``None`` for views and unwritten memory, which run no kernel."""
    packet = func._overloadpacket
    if packet in FREE or _view(func):
        return None
    if packet in PRODUCTS:
        a, b = (args if packet in (aten.mm, aten.bmm) else args[1:])[:2]
        batch = a.shape[0] if a.dim() == 3 else 1
        product = Product(a.shape[-2], b.shape[-1], a.shape[-1], batch, a.dtype.itemsize)
        return Operations(((product, 1),), kernels=1)
    if packet is FLASH:
        return Operations(attention=_attention_flops(args[0], args[1], _causal(args, kwargs, 4)), kernels=1)
    if packet is FLASH_BACKWARD:
        once = _attention_flops(args[1], args[2], _causal(args, kwargs, 7))
        return Operations(attention=int(BACKWARD * once), kernels=1)
    if packet in (aten.convolution, aten.convolution_backward):
        return _convolution(packet, args, out)
    moved = sum(t.numel() * t.dtype.itemsize for t in tensors((args, kwargs, out)))
    return Operations(moved=moved, kernels=1)


@cache
def _view(func: Any) -> bool:
    """Returns true if ``func`` returns a view of its arguments and writes nothing."""
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(a is not None and not a.is_write for a in returned)


def _attention_flops(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """Returns the flops of both products of (batch, heads, length, width), or half of them if causal."""
    batch, heads, length, width = q.shape
    flops = 4 * batch * heads * length * k.shape[2] * width
    return flops // 2 if causal else flops


def _causal(args: Any, kwargs: Any, at: int) -> bool:
    return bool(args[at] if len(args) > at else kwargs.get("is_causal", False))


def _convolution(packet: Any, args: Any, out: Any) -> Operations:
    """Returns a convolution as a matrix product: of each position's neighborhood with the weight."""
    if packet is aten.convolution:
        x, weight = args[:2]
        places, times = out.numel() // out.shape[1], 1
    else:
        grad, x, weight = args[:3]
        places, times = grad.numel() // grad.shape[1], int(args[10][0]) + int(args[10][1])
    product = Product(places, weight.shape[0], weight[0].numel(), 1, x.dtype.itemsize)
    return Operations(((product, times),), kernels=times)


ARGS_OF_ONE_DTYPE = {
    "mm": (0, 1), "addmm": (0, 1, 2), "mv": (0, 1), "addmv": (0, 1, 2), "convolution": (0, 1, 2),
    "index_add": (0, 3), "index_copy": (0, 3), "index_put": (0, 2), "nll_loss_forward": (0, 2),
    "nll_loss2d_forward": (0, 2), "binary_cross_entropy": (0, 1, 2), "_cdist_forward": (0, 1),
    "grid_sampler_2d": (0, 1), "grid_sampler_3d": (0, 1), "_embedding_bag": (0, 6),
    "_embedding_bag_forward_only": (0, 6),
}  # fmt: skip
"""The positions of the arguments that must have one dtype."""

NORMS = {"native_layer_norm": (0, 2, 3), "native_group_norm": (0, 1, 2), "native_batch_norm": (0, 1, 2)}
"""The same positions for norms, whose input may be narrower than their parameters."""

NARROW = (torch.float16, torch.bfloat16)


def disagreement(func: Any, args: Sequence[Any]) -> str:
    """Returns the dtypes that a real kernel of ``func`` would refuse, with the user's line of code, or ""."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    at = ARGS_OF_ONE_DTYPE.get(name) or NORMS.get(name)
    if at is None:
        return ""

    # the dtypes of its arguments; parameters of a norm may be wider than its input
    dtypes = [args[i].dtype for i in at if i < len(args) and isinstance(args[i], torch.Tensor)]
    if name in NORMS and dtypes[0] in NARROW:
        dtypes = dtypes[1:]
    if len(set(dtypes)) < 2 or _autocast():
        return ""

    both = " and ".join(str(d).removeprefix("torch.") for d in dict.fromkeys(dtypes))
    text = f"{name.removeprefix('_')} of {both}"
    where = user_lines.of_now()
    return f"{text} ({where})" if where else text


def _autocast() -> bool:
    """Returns true if autocast is on around the operation.

    The operation runs below autocast, where only the nesting depth shows it.
    """
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting())


ATTENTION = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
RMS_NORM = (F.rms_norm, torch.rms_norm, torch.ops.aten.rms_norm.default)


@dataclass(frozen=True)
class SupportedKernels:
    """The fused kernels that the planned device has: ``attention``, and ``norms`` (RMSNorm).

    ``wide``: its attention supports dropout, and fewer key and value heads than query heads, as CUDA's does.
    """

    attention: bool = True
    norms: bool = False
    wide: bool = False


CPU = SupportedKernels()
_fused = ContextVar("fused", default=CPU)


@contextmanager
def counted_as(fused: SupportedKernels) -> Iterator[None]:
    """Counts operations as a device that has the kernels ``fused``."""
    before = _fused.set(fused)
    try:
        yield
    finally:
        _fused.reset(before)


class FusedKernels(TorchFunctionMode):
    """While entered, fused operations on meta tensors save for backward what they save on devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = None
        fused = _fused.get()
        if func in ATTENTION and fused.attention:
            out = _fused_attention(*args, **kwargs)
        elif func in RMS_NORM and fused.norms:
            out = _rms_norm(*args, **kwargs)
        return func(*args, **kwargs) if out is None else out


def _rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> torch.Tensor | None:
    """Runs LayerNorm's kernel, which reads and saves the same bytes, except for one mean per row.

    Returns ``None`` for a weight of another dtype, for which CUDA decomposes the norm too, and for tensors
    that are not on meta.
    """
    if not isinstance(input, torch.Tensor) or input.device.type != "meta":
        return None
    if weight is not None and weight.dtype != input.dtype:
        return None
    out: torch.Tensor
    out, _, _ = torch.native_layer_norm(input, normalized_shape, weight, None, eps or 1e-6)
    return out


def _fused_attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor | None:
    """Runs the fused kernel; returns ``None`` if devices have none for this call, or off the meta device."""
    # what the kernel supports
    if not all(_takes(t) for t in (q, k, v)) or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return None
    if not _fused.get().wide and (dropout_p > 0 or more.get("enable_gqa")):
        return None
    if attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4)):
        return None

    # a boolean mask becomes 0 or -inf to add, as in torch
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: torch.Tensor
    out, _ = fused(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=more.get("scale"))
    return out


def _takes(t: Any) -> bool:
    """Returns true if ``t`` is on meta and has dims batch, heads, length and width."""
    return isinstance(t, torch.Tensor) and t.device.type == "meta" and t.dim() == 4


class _Flops(Dispatch):
    """Adds up the flops of products, convolutions and attention, as torch's counter, but without hooks."""

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
        mismatch = disagreement(func, args)
        if mismatch:
            self.disagree[mismatch] = None

        out = meta_shapes.run_cached(func, args, kwargs)

        # the tensors that it keeps without a hook, the tensors that it writes, and its cost
        if self.hooks.suspended:
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
                values = value if isinstance(value, list | tuple) else (value,)
                self.written |= {t.untyped_storage()._cdata for t in values if isinstance(t, torch.Tensor)}


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Returns the flops of an ATen operation, as torch's counter: products, convolutions and attention."""
    if func._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention(*(t.shape for t in args[:3]))
    count = flop_registry.get(func._overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def _attention(q: torch.Size, k: torch.Size, v: torch.Size) -> int:
    """Returns the flops of attention for shapes (batch, heads, length, width).

    Keys and values may have fewer heads, which torch counts only since 2.13.
    """
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


class ForwardMeter:
    """Counts forwards while entered; ``flops`` and ``saved`` (bytes) are running totals.

    A storage counts once however often it is saved; parameters and buffers (``own``) do not count. ``kept``
    has all saved storages, including those of ``own``; ``written`` has the storages that operations have
    changed in place. Under torch.func.grad, where torch does not report what is saved, every tensor that
    passes through an operation counts as saved.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self.saved = 0
        self.kept: set[int] = set()
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # storages, because the address of a freed one could be reused
        self._hooks = SavedHooks(self._keep)
        self._flops = _Flops(self._hooks, self._keep)
        self._fused = FusedKernels()
        self.own(own)

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Excludes parameters and buffers from the count."""
        for t in tensors:
            storage = t.untyped_storage()
            self._seen.add(storage._cdata)
            self._alive.append(storage)

    def mark(self) -> Callable[[], None]:
        """Returns a function that resets the totals to their present values."""
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

    def tell(self, callback: Callable[[Any], None]) -> None:
        """Calls ``callback`` with every operation from now on."""
        self._flops.seen = callback

    @property
    def flops(self) -> int:
        return self._flops.total

    @property
    def operations(self) -> OperationsMeter:
        return self._flops.operations

    def _keep(self, t: torch.Tensor) -> torch.Tensor:
        if t.layout is not torch.strided:
            for part in sparse_parts(t):
                self._keep(part)
            return t
        storage = t.untyped_storage()
        self.kept.add(storage._cdata)
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(storage)
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
