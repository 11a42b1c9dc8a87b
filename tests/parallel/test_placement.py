"""Law 5: after ``parallelize`` every local shard is its box, and ``check`` notices when one is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from launcher.parallel.local_tensors import cut, local
from launcher.parallel.parallel_model import ParallelModel
from launcher.parallel.placement_check import check, local_box
from launcher.plan.values.layout import Layout
from launcher.planner.plan_job import plan_job
from tests.parity import build, job, plain
from tests.ranks import on_ranks

HSDP = {"hsdp": {"shard_size": 2, "threshold": 3}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate 2 x shard 2": HSDP | {"grid": {"dp_replicate": 2}},
    "2 stages x shard 2": HSDP | {"pipeline": {"stages": 2}},
    "interleaved x shard 2": HSDP | {"pipeline": {"stages": 2, "interleave": True}},
}


def rank_pieces(world, j, plan) -> int:
    """The number of this rank's tensors, each of which equals its box of the full tensor."""
    par, _ = build(world, j, plan)
    want = dict(plain(j, plan).named_parameters(remove_duplicate=False))
    named = par.named()
    for placed, t in named:
        box = placed.layout.box(world.rank)
        assert torch.equal(local(t), cut(want[placed.name], box)), placed.name
    return len(named)


@pytest.mark.parametrize("parallel", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_every_local_tensor_is_the_content_of_its_box(parallel):
    j = job(parallel=parallel)
    plan = plan_job(j)
    counts = on_ranks(4, rank_pieces, j, plan)
    assert counts == [sum(p.layout.holds(r) for p in plan.params) for r in range(4)]


def swap(par: ParallelModel, name: str, t: torch.Tensor) -> None:
    for part in par.parts:
        owner, _, attr = name.rpartition(".")
        if name in dict(part.module.named_parameters()):
            part.module.get_submodule(owner)._parameters[attr] = nn.Parameter(t)


def too_small(par: ParallelModel) -> None:
    swap(par, "layers.0.attn.q.weight", torch.zeros(3, 16))


def another_shard(par: ParallelModel) -> None:
    """A plan whose shard has the right shape, but is another part of the tensor."""
    name = "layers.0.mlp.gate.weight"
    box = {p.name: p for p in par.plan.params}[name].layout
    wrong = Layout(box.grid, box.shape, ((), ("dp_shard",)), box.at)
    params = tuple(replace(p, layout=wrong) if p.name == name else p for p in par.plan.params)
    object.__setattr__(par, "plan", replace(par.plan, params=params))


def untied(par: ParallelModel) -> None:
    """Two tensors where the plan has one under two names."""
    part = par.parts[0]
    part.module.head._parameters["weight"] = nn.Parameter(part.module.embed.weight.detach().clone())


def lost(par: ParallelModel) -> None:
    for part in par.parts:
        if "norm.weight" in dict(part.module.named_parameters()):
            del part.module.norm._parameters["weight"]


def another_stage(par: ParallelModel) -> None:
    object.__setattr__(par.parts[0], "stage", replace(par.parts[0].stage, index=1 - par.parts[0].stage.index))


def rank_wrong(world, j, plan, harm) -> str:
    par, _ = build(world, j, plan)
    check(par.parts, par.plan, world.rank)
    harm(par)
    with pytest.raises(AssertionError) as found:
        check(par.parts, par.plan, world.rank)
    return str(found.value)


ONE, TWO = {"hsdp": {"shard_size": 2, "threshold": 0}}, {"pipeline": {"stages": 2}}
WRONG = {
    "too small": (too_small, ONE, (
        "rank 0 holds Box(lo=(0, 0), hi=(3, 16)) of layers.0.attn.q.weight, planned Box(lo=(0, 0), hi=(8, 16))"
    )),
    "another shard": (another_shard, ONE, (
        "rank 0 holds Box(lo=(0, 0), hi=(32, 16)) of layers.0.mlp.gate.weight, planned Box(lo=(0, 0), hi=(64, 8))"
    )),
    "untied": (untied, ONE, "rank 0: ['head.weight'] should be the same tensor as embed.weight"),
    "lost": (lost, ONE, "rank 0, stage 0: no ['norm.weight']"),
    "another stage": (another_stage, TWO, "rank 0 runs stages [1], planned {0}"),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "parallel", "text"), list(WRONG.values()), ids=list(WRONG))
def test_a_shard_that_differs_from_the_plan_is_detected(harm, parallel, text):
    j = job(parallel=parallel)
    assert on_ranks(2, rank_wrong, j, plan_job(j), harm)[0] == text


def rank_where(world) -> list[tuple[Any, ...]]:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world.size,))
    found = []
    for rows in (8, 7, 5, 3, 1):
        t = distribute_tensor(torch.arange(float(rows)), mesh, [Shard(0)])
        assert isinstance(t, DTensor)
        box = local_box(t)
        assert torch.equal(t.to_local(), torch.arange(float(rows))[box.lo[0] : box.hi[0]])
        found.append((box.lo, box.hi))
    return found


def test_where_a_shard_is_agrees_with_its_content_for_ragged_sizes_too():
    columns = list(zip(*on_ranks(4, rank_where), strict=True))
    assert columns[1] == (((0,), (2,)), ((2,), (4,)), ((4,), (6,)), ((6,), (7,)))
    assert columns[2] == (((0,), (2,)), ((2,), (4,)), ((4,), (5,)), ((5,), (5,)))
