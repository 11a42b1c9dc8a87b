"""Checks that shards lie where the plan says."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from launcher.parallel.deferred_init.fill import tensors
from launcher.parallel.stages import StagePart
from launcher.plan.plan import Plan
from launcher.plan.values.layout import Box


def check(parts: list[StagePart], plan: Plan, rank: int) -> None:
    """Compares every local tensor with the plan. Raises ``AssertionError``: a difference is a bug of ours."""
    planned = {s.index for s in plan.stages_of(plan.sizes.grid.coords(rank)["pp"])}
    stages = [p.stage.index for p in parts]
    assert set(stages) == planned, f"rank {rank} runs stages {stages}, planned {planned}"

    for part in parts:
        present = set()
        named = tensors(part.module)
        for placed, name, t in part.named(plan.params):
            box = placed.layout.box(rank)
            assert box is not None, f"rank {rank} holds {name}, which the plan puts on stages {placed.stages}"

            # the same box of the full tensor; the position of an empty piece does not matter
            got = local_box(t)
            same = got == box or (got.empty and box.empty)
            if plan.sharding is not None:  # only a piece's shape is known, not its position
                same = got.shape == box.shape
            assert same, f"rank {rank} holds {got} of {name}, planned {box}"

            # tied parameters are still one tensor
            twins = [n for n in placed.names if n in named and named[n] is not t]
            assert not twins, f"rank {rank}: {twins} should be the same tensor as {name}"
            present.add(placed.name)

        # and nothing of the stage was left out
        missing = {p.name for p in plan.params if part.stage.index in p.stages} - present
        assert not missing, f"rank {rank}, stage {part.stage.index}: no {sorted(missing)}"


def local_box(t: torch.Tensor) -> Box:
    """Returns the box of the full tensor that this rank has.

    It begins where torch's chunking puts it, and has the size of the local tensor.
    """
    if not isinstance(t, DTensor):
        return Box((0,) * t.dim(), tuple(t.shape))
    at = t.device_mesh.get_coordinate()
    assert at is not None
    lo, size = [0] * t.dim(), list(t.shape)
    strided = [isinstance(place, _StridedShard) for place in t.placements]

    # strided placements come last: they are FSDP2's, which splits the parts that tp has made
    for axis in sorted(range(len(t.placements)), key=lambda a: strided[a]):
        place = t.placements[axis]
        if isinstance(place, Shard | _StridedShard):
            sizes = [len(c) for c in torch.arange(size[place.dim]).chunk(t.device_mesh.size(axis))]
            lo[place.dim] += sum(sizes[: at[axis]])
            size[place.dim] = sizes[at[axis]] if at[axis] < len(sizes) else 0
    return Box(tuple(lo), tuple(a + n for a, n in zip(lo, t.to_local().shape, strict=True)))
