"""Checks that shards lie where the plan says, and that ranks agree."""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from launcher.errors import RunError
from launcher.parallel import byte_collectives
from launcher.parallel.deferred_init.fill import FullTensorOf, InitialTensors, tensors
from launcher.parallel.stages import StagePart
from launcher.plan.plan import Plan
from launcher.plan.values.layout import Box


def check(parts: list[StagePart], plan: Plan, rank: int) -> None:
    """Compare every local tensor with the plan. Raises ``AssertionError``: a difference is a bug of ours."""
    planned = {s.index for s in plan.stages_of(plan.sizes.grid.coords(rank)["pp"])}
    stages = [p.stage.index for p in parts]
    assert set(stages) == planned, f"rank {rank} runs stages {stages}, planned {planned}"

    for part in parts:
        present = set()
        named = tensors(part.module)
        for placed, name, t in part.named(plan.params):
            box = placed.layout.box(rank)
            assert box is not None, f"rank {rank} holds {name}, which the plan puts on stages {placed.stages}"

            # the same part of the full tensor; the place of an empty piece does not matter
            got = where(t)
            same = got == box or (got.empty and box.empty)
            if plan.sharding is not None:  # a part's place is known from nothing but its shape
                same = got.shape == box.shape
            assert same, f"rank {rank} holds {got} of {name}, planned {box}"

            # tied parameters are still one tensor
            twins = [n for n in placed.names if n in named and named[n] is not t]
            assert not twins, f"rank {rank}: {twins} should be the same tensor as {name}"
            present.add(placed.name)

        # and nothing of the stage was left out
        missing = {p.name for p in plan.params if part.stage.index in p.stages} - present
        assert not missing, f"rank {rank}, stage {part.stage.index}: no {sorted(missing)}"


def where(t: torch.Tensor) -> Box:
    """Return the box of the full tensor that this rank has.

    It begins where torch's chunking puts it, and has the size of the local tensor.
    """
    if not isinstance(t, DTensor):
        return Box((0,) * t.dim(), tuple(t.shape))
    at = t.device_mesh.get_coordinate()
    assert at is not None
    lo, size = [0] * t.dim(), list(t.shape)
    strided = [isinstance(place, _StridedShard) for place in t.placements]

    # FSDP2, whose placements are the strided ones, splits what tp has split before
    for axis in sorted(range(len(t.placements)), key=lambda a: strided[a]):
        place = t.placements[axis]
        if isinstance(place, Shard | _StridedShard):
            sizes = [len(c) for c in torch.arange(size[place.dim]).chunk(t.device_mesh.size(axis))]
            lo[place.dim] += sum(sizes[: at[axis]])
            size[place.dim] = sizes[at[axis]] if at[axis] < len(sizes) else 0
    return Box(tuple(lo), tuple(a + n for a, n in zip(lo, t.to_local().shape, strict=True)))


CAUSE = "something depends on what differs between processes, such as the order of a set of strings"
CURE = "sort it there, or start all ranks with the same PYTHONHASHSEED"


def check_agreement(parts: list[StagePart], full_tensor: FullTensorOf) -> None:
    """Compare the traced code and the initial tensors of all ranks. Every rank calls this.

    Raises ``RunError`` if weights would start from different values, or stages would not fit together.
    """
    # one digest per rank: nearly always they are equal
    code = parts[0].code
    made = full_tensor.texts() if isinstance(full_tensor, InitialTensors) else {}
    digest = hashlib.blake2b(repr((code, sorted(made.items()))).encode()).hexdigest()
    if len(set(_gathered(digest))) == 1:
        return

    # the first difference
    lines, *others = _gathered(code)
    for rank, theirs in enumerate(others, 1):
        for one, other in zip_longest(lines, theirs, fillvalue="nothing"):
            if one != other:
                text = f"the code between the named modules is '{one}' on rank 0 and '{other}' on rank {rank}"
                raise RunError(f"{text}: {CAUSE}; {CURE}")
    _same_numbers(made, full_tensor)


def _same_numbers(made: dict[str, str], full_tensor: FullTensorOf) -> None:
    """Compare the values of tensors made in different ways: one rank may have used a cache."""
    every = _gathered(made)
    names = sorted({n for texts in every for n in texts})
    doubtful = [n for n in names if len({texts.get(n) for texts in every}) > 1]
    digests = {n: _digest(full_tensor, n) for n in doubtful if n in made}
    for rank, theirs in enumerate(_gathered(digests)):
        for name in doubtful:
            if theirs.get(name) != digests.get(name):
                text = f"{name} has other initial values on rank {rank} than on rank {dist.get_rank()}"
                raise RunError(f"{text}: in the constructor {CAUSE}; {CURE}")


def _digest(full_tensor: FullTensorOf, name: str) -> str:
    numbers = full_tensor(name).contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.tobytes()).hexdigest()


def _gathered(mine: Any) -> list[Any]:
    """Return the value of every rank, through JSON."""
    return [json.loads(body) for body in byte_collectives.all_gather(json.dumps(mine).encode())]
