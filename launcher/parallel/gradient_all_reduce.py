"""All-reduces of gradients, several tensors in one bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from launcher.parallel.local_tensors import local
from launcher.parallel.mesh import Meshes, flags, to_host
from launcher.parallel.stages import StagePart
from launcher.parallel.trace.tensor_specs import dtype_of
from launcher.plan.plan import Plan


@dataclass(frozen=True)
class Bucketed:
    """This rank's tensors of a bucket, in the plan's order; ``dtype``: that of the sum, if not their own."""

    tensors: tuple[torch.Tensor, ...]
    group: dist.ProcessGroup | None
    dtype: torch.dtype | None = None

    def reduce(self) -> None:
        """Sums the gradients over the group."""
        all_reduce_gradients(self.tensors, self.group, self.dtype)


def tensor_parallel_buckets(part: StagePart, plan: Plan, meshes: Meshes) -> list[Bucketed]:
    """Returns the buckets of ``part`` that are summed over ``tp``: each rank has a term."""
    mine = {p.name: t for p, _, t in part.named(plan.params)}
    own = [b for b in plan.sums if b.stage == part.stage.index]
    return [Bucketed(tuple(mine[n] for n in b.names), meshes.tp) for b in own]


def data_parallel_buckets(part: StagePart, plan: Plan, meshes: Meshes) -> list[Bucketed]:
    """Returns the data-parallel buckets of ``part``."""
    mine = {p.name: t for p, _, t in part.named(plan.params)}
    own = [b for b in plan.buckets if b.stage == part.stage.index]
    assert meshes.dp is not None or not own, "buckets without replicas"
    dtype = dtype_of(plan.dtypes.reduce) if plan.dtypes.mixed else None
    return [Bucketed(tuple(mine[n] for n in b.names), meshes.dp, dtype) for b in own]


@torch.no_grad()
def all_reduce_gradients(
    tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None
) -> None:
    """Sums the local gradients of ``tensors`` over ``group`` in one collective, in ``dtype``.

    The gradients have one dtype. A missing gradient counts as zero. If it is missing on every rank, it stays
    missing, because the optimizer must not decay that parameter.
    """
    # zeros for missing gradients
    has = [t.grad is not None for t in tensors]
    for t in tensors:
        if t.grad is None:
            t.grad = torch.zeros_like(t)
    grads = [local(t.grad) for t in tensors if t.grad is not None]

    # one flat tensor, followed by the number of ranks that have each gradient
    marks = flags(has, grads[0].device, grads[0].dtype)
    flat = torch.cat([*(g.reshape(-1) for g in grads), marks])
    flat = flat if dtype is None else flat.to(dtype)
    dist.all_reduce(flat, group=group)

    # copy the sums back
    *summed, anywhere = flat.split([*(g.numel() for g in grads), len(grads)])
    for g, piece in zip(grads, summed, strict=True):
        g.copy_(piece.view_as(g))
    if not all(has):
        for t, ranks_with_grad in zip(tensors, to_host(anywhere).tolist(), strict=True):
            t.grad = t.grad if ranks_with_grad else None
