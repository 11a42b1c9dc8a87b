"""Law 7: the copies of a tied tensor are bit-equal after every optimizer step, and after ``sync`` from any state."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from launcher.optim.build import build_optimizer
from launcher.parallel.gradient_all_reduce import all_reduce_gradients
from launcher.parallel.local_tensors import local
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, build, job, own, pieces, step, whole
from tests.ranks import on_ranks
from tests.tiers import some

LAYOUTS: dict[str, dict[str, Any]] = {
    "2 stages": {"pipeline": {"stages": 2}},
    "4 stages": {"pipeline": {"stages": 4, "scheduler": "gpipe"}},
    "2 stages, replicate 2": {"pipeline": {"stages": 2}, "grid": {"dp_replicate": 2}},
    "2 stages x shard 2": {"pipeline": {"stages": 2}, "hsdp": {"shard_size": 2, "threshold": 0}},
    "2 stages x shard 2, whole": {"pipeline": {"stages": 2}, "hsdp": {"shard_size": 2}},
    "interleaved": {"pipeline": {"stages": 2, "interleave": True}},
    "there and back, one copy": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v"}},
    "there and back x shard 2": {
        "pipeline": {"stages": 2, "scheduler": "zero_bubble_v"},
        "hsdp": {"shard_size": 2, "threshold": 0},
    },
}
THRICE = {"embed": 0, "a": 0, "b": 1, "again": 2, "c": 3, "head": 3}
"""Interleaved over two ranks: the first has two copies, and the second has one."""
JOBS = {name: job(parallel=p, train__precision="fp32", optim__lr=1e-2) for name, p in LAYOUTS.items()} | {
    f"three copies on two ranks{', sharded' if more else ''}": own(
        "nets.Thrice", ["int64", 5], stages=THRICE, train__precision="fp32", optim__lr=1e-2, train__batch_size=8,
        parallel={"pipeline": {"stages": 2, "interleave": True, "stage_config": THRICE}, **more},
    )
    for more in ({}, {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}})
}  # fmt: skip
every_job = pytest.mark.parametrize("job", some(JOBS.values()), ids=some(JOBS))


def rank_each_step(world, j, plan, steps: int) -> list[list[Any]]:
    """The weights after each step."""
    par, pipe = build(world, j, plan)
    optimizer, out = build_optimizer(j.optim, par.param_groups()), []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        step(j, par, pipe)
        optimizer.step()
        out.append(pieces(par, weights=True))
    return out


def table(plan, ranks) -> torch.Tensor:
    """The tied table of all ranks put together, after a check that all copies are bit-equal."""
    mine = [p for held in ranks for p in held if p.name == "embed.weight"]
    copies = len(plan.ties[0].stages) * plan.sizes.replicas // len({p.box for p in mine})
    assert len(mine) == copies * len({p.box for p in mine})
    return whole(plan, mine)["embed.weight"]


@every_job
def test_copies_are_bit_equal_after_every_one_of_20_steps(job):
    plan = plan_job(job)
    assert [len(t.stages) for t in plan.ties] == [3 if "Thrice" in str(job.model) else 2]
    ranks = on_ranks(plan.sizes.grid.size, rank_each_step, job, plan, 20)
    after = [table(plan, held) for held in zip(*ranks, strict=True)]
    assert len(after) == 20
    assert not any(torch.equal(a, b) for a, b in pairwise(after))


def rank_sync(world, j, plan) -> tuple[list[Any], list[Any]]:
    """The weights before and after ``sync``, if every copy starts with its own numbers."""
    par, _ = build(world, j, plan)
    for part in par.parts:
        for at, (placed, _, t) in enumerate(part.named(plan.params)):
            shard = par.meshes.coords["dp_shard"] if placed.sharded else 0
            seed = 1000 * part.stage.index + 10 * at + shard
            local(t.detach()).normal_(generator=torch.Generator().manual_seed(seed))
    before = pieces(par, weights=True)
    for tied in par.ties:
        tied.sync()
    return before, pieces(par, weights=True)


FROZEN = {
    f"frozen{', sharded' if more else ''}": own(
        "nets.FrozenTied", ["int64", 5], stages={"embed": 0, "mid": 0, "head": 1}, **more
    )
    for more in ({}, {"parallel__hsdp": {"shard_size": 2, "threshold": 0}})
}  # fmt: skip


@pytest.mark.parametrize("job", some([*JOBS.values(), *FROZEN.values()]), ids=some([*JOBS, *FROZEN]))
def test_sync_makes_every_copy_that_of_the_first_stage_from_any_state(job):
    plan = plan_job(job)
    ranks = on_ranks(plan.sizes.grid.size, rank_sync, job, plan)
    synced = table(plan, [after for _, after in ranks])
    first = next(p for p in ranks[0][0] if p.name == "embed.weight")
    assert torch.equal(synced[: first.value.shape[0]], first.value)


def test_three_copies_get_the_gradient_of_one_process():
    for name in ("three copies on two ranks", "three copies on two ranks, sharded"):
        train = JOBS[name].train.model_copy(update={"precision": "fp64"})
        assert_parity(JOBS[name].model_copy(update={"train": train}))


def rank_total(world) -> list[Any]:
    a, b, c = (torch.zeros(3, requires_grad=True) for _ in range(3))
    a.grad = torch.full((3,), float(world.rank + 1))
    if world.rank == 0:
        b.grad = torch.ones(3)
    all_reduce_gradients((a, b, c), None)
    return [None if t.grad is None else t.grad.tolist() for t in (a, b, c)]


def test_a_gradient_that_some_ranks_miss_counts_as_zero_and_one_that_all_miss_stays_missing():
    assert on_ranks(2, rank_total) == [[[3.0] * 3, [1.0] * 3, None]] * 2


def rank_without(world, j, plan) -> dict[str, bool]:
    par, pipe = build(world, j, plan)
    step(j, par, pipe)
    return {n: t.grad is None for n, t in par.trainable()}


@pytest.mark.parametrize("parallel", [
    {"pipeline": {"stages": 2}}, {"grid": {"dp_replicate": 2}}, {"hsdp": {"shard_size": 2, "threshold": 0}},
], ids=["2 stages", "replicate 2", "shard 2"])  # fmt: skip
def test_a_parameter_that_nothing_uses_has_no_gradient_in_any_layout(parallel):
    j = own("nets.Unused", [6], stages=1, parallel=parallel)
    for found in on_ranks(2, rank_without, j, plan_job(j)):
        assert all(missing == ("extra" in n) for n, missing in found.items())
