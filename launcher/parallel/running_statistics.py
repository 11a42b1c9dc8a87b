"""Makes running statistics, such as BatchNorm's, equal over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from launcher.parallel.mesh import Meshes
from launcher.parallel.stages import StagePart
from launcher.plan.plan import Plan


@dataclass(frozen=True)
class Statistics:
    """The persistent buffers of this rank by module and name, as a forward may replace the tensor."""

    places: tuple[tuple[nn.Module, str], ...]
    group: dist.ProcessGroup | None

    @torch.no_grad()
    def share(self) -> None:
        """Broadcast them, in one collective per dtype."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for module, name in self.places:
            t = getattr(module, name)
            by_dtype.setdefault(t.dtype, []).append(t)
        for same in by_dtype.values():
            flat = torch.cat([t.reshape(-1) for t in same])
            dist.broadcast(flat.view(torch.uint8), group_src=0, group=self.group)  # gloo supports few dtypes
            for t, piece in zip(same, flat.split([t.numel() for t in same]), strict=True):
                t.copy_(piece.view_as(t))


def statistics(parts: Iterable[StagePart], plan: Plan, meshes: Meshes) -> Statistics:
    """Return the statistics to share; none with one data-parallel rank."""
    if plan.sizes.replicas == 1:
        return Statistics((), meshes.dp)
    places = []
    for part in parts:
        for placed, name, _ in part.named(plan.params):
            if placed.buffer:
                owner, _, attr = name.rpartition(".")
                places.append((part.module.get_submodule(owner), attr))
    return Statistics(tuple(places), meshes.dp)
