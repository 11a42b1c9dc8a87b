"""An asynchronous reduce-scatter of full gradients, with an all-reduce of the shards over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Its name since torch 2.13, which deprecates the older name."""


class ReduceScatter:
    """A reduction of the gradients of FSDP2's ``params``, all of one dtype, to this rank's shards.

    The memory layout is FSDP2's, so that results are bit-equal: all that a rank keeps is contiguous. Nothing
    waits before ``proceed`` or ``end``, which every rank calls in the same order.
    """

    def __init__(self, params: Sequence[Any], grads: Sequence[Tensor], dtype: torch.dtype) -> None:
        mesh = params[0].mesh_info
        self._params = params
        self._replicas: dist.ProcessGroup | None = getattr(mesh, "replicate_process_group", None)
        group: dist.ProcessGroup = mesh.shard_process_group
        ranks = group.size()

        # each rank's shards, side by side
        whole = [_rows_first(p, g, ranks) for p, g in zip(params, grads, strict=True)]
        self._kept = [_padded(g, ranks) // ranks for g in whole]
        given = torch.empty(ranks * sum(self._kept), dtype=dtype, device=whole[0].device)
        torch._chunk_cat(whole, dim=0, num_chunks=ranks, out=given.view(ranks, -1))

        # in flight; the transport reads the input until it is done
        self._given: Tensor | None = given
        self._out = torch.empty(sum(self._kept), dtype=dtype, device=given.device)
        self._work: Any = _reduce_scatter(self._out, given, group=group, async_op=True)

    def proceed(self) -> None:
        """Wait for the scatter, free its input, and start the sum over replicas."""
        if self._given is None:
            return
        self._wait()
        self._given = None
        if self._replicas is not None:
            self._work = dist.all_reduce(self._out, group=self._replicas, async_op=True)

    def end(self) -> None:
        """Wait, and add the result to the gradients of the shards."""
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
    """Return the gradient with the dim along which it is split as rows, rank after rank."""
    dim = p.fsdp_placement.dim
    return grad if dim == 0 else torch.cat(grad.chunk(ranks, dim), 0)


def _padded(grad: Tensor, ranks: int) -> int:
    """Return the size of a gradient whose rows are padded to a multiple of ``ranks``."""
    rows, *rest = grad.shape
    return -(-rows // ranks) * ranks * prod(rest)
