"""Notes the work that each operation on meta tensors would be on a device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from launcher.parallel.dispatch.containers import tensors
from launcher.plan.values.operations import Operations, Product, total

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
BACKWARD = 2.5
"""Flops of a flash attention's backward per flop of its forward: five products for two."""
PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
FREE = frozenset({
    aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.lift_fresh,
})  # fmt: skip


class OperationsMeter:
    """The operations since any ``mark``."""

    def __init__(self) -> None:
        self._seen: list[Operations] = []

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note one operation and what it returned."""
        found = operations_of(func, args, kwargs, out)
        if found is not None:
            self._seen.append(found)

    def mark(self) -> int:
        """Return a mark for ``since`` and ``forget``."""
        return len(self._seen)

    def since(self, mark: int) -> Operations:
        return total(self._seen[mark:])

    def forget(self, mark: int) -> None:
        """Drop all operations since ``mark``."""
        del self._seen[mark:]


def operations_of(func: Any, args: Any, kwargs: Any, out: Any) -> Operations | None:
    """Return the work of one operation, or ``None`` for views and unwritten memory, which run no kernel."""
    packet = func._overloadpacket
    if packet in FREE or _view(func):
        return None
    if packet in PRODUCTS:
        a, b = (args if packet in (aten.mm, aten.bmm) else args[1:])[:2]
        batch = a.shape[0] if a.dim() == 3 else 1
        product = Product(a.shape[-2], b.shape[-1], a.shape[-1], batch, a.dtype.itemsize)
        return Operations(((product, 1),), kernels=1)
    if packet is FLASH:
        return Operations(attention=_attention(args[0], args[1], _causal(args, kwargs, 4)), kernels=1)
    if packet is FLASH_BACKWARD:
        once = _attention(args[1], args[2], _causal(args, kwargs, 7))
        return Operations(attention=int(BACKWARD * once), kernels=1)
    if packet in (aten.convolution, aten.convolution_backward):
        return _convolution(packet, args, out)
    moved = sum(t.numel() * t.dtype.itemsize for t in tensors((args, kwargs, out)))
    return Operations(moved=moved, kernels=1)


@cache
def _view(func: Any) -> bool:
    """Whether ``func`` returns a view of its arguments, and writes nothing."""
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(a is not None and not a.is_write for a in returned)


def _attention(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """Return the flops of two products for (batch, heads, length, width), or half of them if causal."""
    batch, heads, length, width = q.shape
    flops = 4 * batch * heads * length * k.shape[2] * width
    return flops // 2 if causal else flops


def _causal(args: Any, kwargs: Any, at: int) -> bool:
    return bool(args[at] if len(args) > at else kwargs.get("is_causal", False))


def _convolution(packet: Any, args: Any, out: Any) -> Operations:
    """Return a convolution as a matrix product: of each position's neighbourhood with the weight."""
    if packet is aten.convolution:
        x, weight = args[:2]
        places, times = out.numel() // out.shape[1], 1
    else:
        grad, x, weight = args[:3]
        places, times = grad.numel() // grad.shape[1], int(args[10][0]) + int(args[10][1])
    product = Product(places, weight.shape[0], weight[0].numel(), 1, x.dtype.itemsize)
    return Operations(((product, times),), kernels=times)
