"""Makes running statistics, such as BatchNorm's, equal over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from launcher.parallel.mesh import Meshes
from launcher.parallel.stages import StagePart
from launcher.plan.plan import Plan


@dataclass(frozen=True)
class Buffer:
    """A persistent buffer, kept as its module and attribute because a forward may replace the tensor.

    ``steady``: the forward did not change it during planning, and it is not a statistic of a BatchNorm.
    """

    module: nn.Module
    attr: str
    name: str
    steady: bool

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.module, self.attr)
        return found


@dataclass(frozen=True)
class Statistics:
    """This rank's persistent buffers; each step ends with a copy from the first data-parallel rank.

    ``apart`` has the steady buffers, and a mask of their bytes that differed from those of the first rank.
    """

    buffers: tuple[Buffer, ...]
    group: dist.ProcessGroup | None
    apart: list[tuple[tuple[Buffer, ...], torch.Tensor]] = field(default_factory=list)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Broadcasts the buffers, in one collective per dtype and kind (steady or not)."""
        self.apart.clear()
        alike: dict[tuple[torch.dtype, bool], list[Buffer]] = {}
        for b in self.buffers:
            alike.setdefault((b.tensor.dtype, b.steady), []).append(b)
        for (_, steady), same in alike.items():
            tensors = [b.tensor for b in same]
            flat = torch.cat([t.reshape(-1) for t in tensors])
            raw = flat.view(torch.uint8)  # gloo supports few dtypes
            own = raw.clone() if steady else None
            dist.broadcast(raw, group_src=0, group=self.group)
            if own is not None:
                self.apart.append((tuple(same), raw != own))
            for t, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                t.copy_(piece.view_as(t))

    def differing(self) -> list[str]:
        """Returns the steady buffers that differed; makes the CPU wait for the device."""
        out = []
        for same, apart in self.apart:
            each = apart.split([b.tensor.nbytes for b in same])
            out += [b.name for b, differs in zip(same, each, strict=True) if bool(differs.any())]
        return out


def statistics(parts: Iterable[StagePart], plan: Plan, meshes: Meshes) -> Statistics:
    """Returns the statistics to broadcast; there are none with one data-parallel rank."""
    if plan.sizes.replicas == 1:
        return Statistics((), meshes.dp)
    buffers = []
    for part in parts:
        for placed, name, _ in part.named(plan.params):
            if placed.buffer:
                owner, _, attr = name.rpartition(".")
                module = part.module.get_submodule(owner)
                moves = isinstance(module, nn.modules.batchnorm._NormBase)
                steady = not moves and not {*plan.observed.changed} & {*placed.names}
                buffers.append(Buffer(module, attr, placed.name, steady=steady))
    return Statistics(tuple(buffers), meshes.dp)
