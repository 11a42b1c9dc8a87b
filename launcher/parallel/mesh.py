"""The device mesh and its process groups, and copies between a device and the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launcher.plan.cut.tensor_placement import Tie
from launcher.plan.values.grid import Grid


@dataclass(frozen=True)
class Meshes:
    """This rank's process groups.

    ``ties`` has one per row of pipeline ranks that share a tensor. ``dp`` and ``tp`` are ``None`` if they
    would have one rank.
    """

    rank: int
    grid: Grid
    mesh: DeviceMesh
    pp: dist.ProcessGroup
    tp: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None
    ties: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def shard(self) -> DeviceMesh:
        """The mesh that FSDP2 takes: replicate x shard."""
        names = ("dp_replicate", "dp_shard") if self.grid["dp_replicate"] > 1 else ("dp_shard",)
        return self.mesh[names]

    @property
    def axes(self) -> dict[str, dist.ProcessGroup]:
        """The group of ranks that differ from this one along each axis of several ranks."""
        return {axis: self.mesh.get_group(axis) for axis, n in self.grid.axes if n > 1}

    @property
    def coords(self) -> dict[str, int]:
        return self.grid.coords(self.rank)


def build(grid: Grid, device: str, tied: Iterable[Tie], apart: bool = False) -> Meshes:
    """Makes all process groups.

    Every rank calls this with the same arguments: all ranks make each group, in one order.

    ``apart``: make a separate group for the pipeline even if it spans the world, because the group of the
    world may have another timeout.
    """
    rank = dist.get_rank()
    sizes = {axis: n for axis, n in grid.axes if n > 1 or axis == "pp"}  # making a group costs 10 ms
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    # one group over both data-parallel axes
    replicas = [axis for axis in ("dp_replicate", "dp_shard") if axis in sizes]
    if len(replicas) > 1:
        dp = mine(rank, (grid.peers(r, *replicas) for r in range(grid.size)))
    else:
        dp = mesh.get_group(replicas[0]) if replicas else None

    # one group for each row of pipeline ranks that share a tensor
    ties = {}
    for places in dict.fromkeys(t.ranks for t in tied):
        if len(places) > 1:
            rows = (tuple(grid.rank(**grid.coords(r) | {"pp": p}) for p in places) for r in range(grid.size))
            group = mine(rank, rows)
            if group is not None:
                ties[places] = group

    tp = mesh.get_group("tp") if "tp" in sizes else None
    pp = mesh.get_group("pp")
    if apart and grid["pp"] == grid.size > 1:
        pp = dist.new_group(list(range(grid.size)))
    return Meshes(rank=rank, grid=grid, mesh=mesh, pp=pp, tp=tp, dp=dp, ties=ties)


def mine(rank: int, rows: Iterable[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """Makes one group per distinct row, and returns the one that contains ``rank``."""
    own = None
    for ranks in dict.fromkeys(rows):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own = group
    return own


def flags(each: Sequence[bool], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns ones and zeros, filled on ``device``: copying a list to it would make the CPU wait."""
    out = torch.ones(len(each), device=device, dtype=dtype)
    for i, one in enumerate(each):
        if not one:
            out[i].zero_()
    return out


def to_host(t: torch.Tensor) -> torch.Tensor:
    """Returns ``t`` on the CPU, which waits for all earlier work of its device."""
    return t.cpu()
