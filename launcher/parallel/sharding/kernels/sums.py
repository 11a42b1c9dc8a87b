"""Operators with terms of a sum: a bias that one rank adds, means, rows that another rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.torch_op import Run, bound, torch_op
from launcher.plan.sharding.op_graph import Ref

BIAS_FIRST = ("addmm", "baddbmm", "addmv")
TENSORS_WITH_BIAS = {"bilinear": 4}


def bias_once(call: LocalCall, run: Run) -> Run:
    """Let only ranks with the first of the summed parts add the bias; others add zeros."""
    kind = call.node.kind
    place = 0 if kind in BIAS_FIRST else TENSORS_WITH_BIAS.get(kind, 3) - 1
    if place >= len(call.ins) or call.first(call.rule.sums):
        return run

    def with_zeros(*tensors: Tensor) -> Any:
        zeros = _Zeros.apply(tensors[place])  # type: ignore[no-untyped-call]
        return run(*tensors[:place], zeros, *tensors[place + 1 :])

    return with_zeros


class _Zeros(torch.autograd.Function):
    """Replaces a tensor by zeros; its gradient is zero but exists, as it does on the other ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def mean(call: LocalCall, run: Run) -> Run:
    """Divide by the number of parts: they are equal, so the mean is the sum of their means divided by it."""
    ways = call.ways(*call.rule.sums)
    return run if ways == 1 else lambda *tensors: run(*tensors) / ways


def embedding(call: LocalCall, run: Run, device: torch.device) -> Run:
    """Return zeros for indices whose row is on another rank."""
    ways = call.ways("v")
    if ways == 1:
        return run
    rows = call.ins[0][0] // ways
    low = call.part("v") * rows
    padding = call.node.args[2] if len(call.node.args) > 2 else -1
    assert isinstance(padding, int)
    here = padding - low if low <= padding < low + rows else -1
    classes = call.ins[0][0]
    beyond = f"an index is beyond the {classes} rows of the embedding"
    look_up = bound(torch_op("embedding"), (Ref(0), Ref(1), here), {}, device)

    def masked(table: Tensor, indices: Tensor) -> Tensor:
        torch._assert_async(((indices >= 0) & (indices < classes)).all(), beyond)
        local = indices - low
        elsewhere = (local < 0) | (local >= rows)
        found: Tensor = look_up(table, local.masked_fill(elsewhere, 0))
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)

    return masked
