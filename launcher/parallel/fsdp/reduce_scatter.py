"""One reduce-scatter of whole gradients, over replicas an all-reduce of what is kept: beside other work."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Its name since torch 2.13, which warns of the one before."""


class ReduceScatter:
    """Gradients of FSDP2's ``params``, of one dtype, on their way to this rank's shards.

    Laid out as FSDP2 does it, and so the same to the last bit: all that a rank keeps lies together. Nothing
    here is waited for before ``proceed`` or ``end``; both are called in one order on every rank.
    """

    def __init__(self, params: Sequence[Any], grads: Sequence[Tensor], dtype: torch.dtype) -> None:
        mesh = params[0].mesh_info
        self._params = params
        self._replicas: dist.ProcessGroup | None = getattr(mesh, "replicate_process_group", None)
        group: dist.ProcessGroup = mesh.shard_process_group
        ranks = group.size()

        # what each rank keeps, side by side
        whole = [_rows_first(p, g, ranks) for p, g in zip(params, grads, strict=True)]
        self._kept = [_padded(g, ranks) // ranks for g in whole]
        given = torch.empty(ranks * sum(self._kept), dtype=dtype, device=whole[0].device)
        torch._chunk_cat(whole, dim=0, num_chunks=ranks, out=given.view(ranks, -1))

        # on its way; the transport reads what is given until then
        self._given: Tensor | None = given
        self._out = torch.empty(sum(self._kept), dtype=dtype, device=given.device)
        self._work: Any = _reduce_scatter(self._out, given, group=group, async_op=True)

    def proceed(self) -> None:
        """Once it is scattered: let go of what was given, and sum over replicas."""
        if self._given is None:
            return
        self._wait()
        self._given = None
        if self._replicas is not None:
            self._work = dist.all_reduce(self._out, group=self._replicas, async_op=True)

    def end(self) -> None:
        """The shards have their gradients."""
        self.proceed()
        self._wait()
        out = self._out.to(self._params[0].orig_dtype)
        at = 0
        for p, kept in zip(self._params, self._kept, strict=True):
            mine = out.as_strided(p.sharded_size, p.contiguous_sharded_stride, at)
            at += kept
            if p.sharded_param.grad is None:
                p.sharded_param.grad = p.to_sharded_dtensor(mine)
            else:
                p.sharded_param.grad._local_tensor += mine

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def _rows_first(p: Any, grad: Tensor, ranks: int) -> Tensor:
    """The gradient as it is cut, which is along its first dim."""
    dim = p.fsdp_placement.dim
    return grad if dim == 0 else torch.cat(grad.chunk(ranks, dim), 0)


def _padded(grad: Tensor, ranks: int) -> int:
    """Numbers of a gradient whose rows are as many on each rank."""
    rows, *rest = grad.shape
    return -(-rows // ranks) * ranks * prod(rest)
