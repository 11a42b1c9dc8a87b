"""Sends what one rank has read to the ranks that use it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from launcher.parallel.trace.model_facts import dtype_of
from launcher.plan.values.batch_reading import BatchRole
from launcher.runtime.cluster.value_collectives import recv, send

Tensors = tuple[torch.Tensor, ...]
_Shapes = list[tuple[tuple[int, ...], str]]


def deal(hand: BatchRole, read: Callable[[], Tensors]) -> Tensors:
    """Returns the tensors, on the CPU, on a rank that uses them; an empty tuple on the others.

    ``read`` is called only on a rank that reads. Tensors travel between pairs of ranks of the default group,
    in host memory: the model's process groups are not in use then.
    """
    if hand.takes is not None:
        return _take(hand.takes)
    if not hand.reads:
        return ()
    tensors = read()
    for rank in hand.gives:
        _give(tensors, rank)
    return tensors if hand.uses else ()


def _give(tensors: Tensors, rank: int) -> None:
    """Sends shapes and dtypes first: the receiving rank has opened no file and does not know them."""
    send([(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors], _Shapes, rank)
    for t in tensors:
        dist.send(t.contiguous(), rank)


def _take(rank: int) -> Tensors:
    shapes: _Shapes = recv(_Shapes, rank)
    tensors = tuple(torch.empty(shape, dtype=dtype_of(dtype)) for shape, dtype in shapes)
    for t in tensors:
        dist.recv(t, rank)
    return tensors
