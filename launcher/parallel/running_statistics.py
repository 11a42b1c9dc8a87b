"""Makes running statistics, such as BatchNorm's, equal over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn

from launcher.parallel.mesh import Meshes
from launcher.parallel.stages import StagePart
from launcher.parallel.trace.module_kinds import is_mean_over_samples
from launcher.plan.plan import Plan


class Kind(Enum):
    """How the ranks' copies of a buffer become equal depends on its kind.

    ``STEADY``: the forward did not change it during planning, and it is not a statistic of a norm.
    ``MEAN``: a statistic of an InstanceNorm, which is a mean over samples. The mean over the ranks is
    therefore what one process has. ``FIRST``: any other; that of the first rank is taken.
    """

    STEADY = "steady"
    MEAN = "mean"
    FIRST = "first"


@dataclass(frozen=True)
class Buffer:
    """A persistent buffer, kept as its module and attribute because a forward may replace the tensor.

    ``kind``: what the copies of the ranks become.
    """

    module: nn.Module
    attr: str
    name: str
    kind: Kind

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.module, self.attr)
        return found


@dataclass(frozen=True)
class Statistics:
    """This rank's persistent buffers, which each step makes equal over the data-parallel ranks.

    ``apart`` has the steady buffers, and a mask of their bytes that differed from those of the first rank.
    """

    buffers: tuple[Buffer, ...]
    group: dist.ProcessGroup | None
    apart: list[tuple[tuple[Buffer, ...], torch.Tensor]] = field(default_factory=list)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Makes the buffers equal, in one collective per dtype and kind."""
        self.apart.clear()
        alike: dict[tuple[torch.dtype, Kind], list[Buffer]] = {}
        for b in self.buffers:
            alike.setdefault((b.tensor.dtype, b.kind), []).append(b)
        for (_, kind), same in alike.items():
            tensors = [b.tensor for b in same]
            flat = torch.cat([t.reshape(-1) for t in tensors])
            if kind is Kind.MEAN:
                wide = flat if flat.dtype is torch.float64 else flat.float()
                dist.all_reduce(wide, group=self.group)
                flat = (wide / dist.get_world_size(self.group)).to(flat.dtype)
            else:
                raw = flat.view(torch.uint8)  # gloo supports few dtypes
                own = raw.clone() if kind is Kind.STEADY else None
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
                changed = bool({*plan.observed.changed} & {*placed.names})
                buffers.append(Buffer(module, attr, placed.name, _kind(module, attr, changed=changed)))
    return Statistics(tuple(buffers), meshes.dp)


def _kind(module: nn.Module, attr: str, *, changed: bool) -> Kind:
    if changed and is_mean_over_samples(module, attr):
        return Kind.MEAN
    return Kind.FIRST if changed or isinstance(module, nn.modules.batchnorm._NormBase) else Kind.STEADY
