"""The collectives of a real step, rank by rank, beside those of the plan."""

from __future__ import annotations

from typing import Any

import torch

from launcher.parallel.norms import grad_norm
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.testing.collective_counter import Collectives
from tests.parity import build, step
from tests.ranks import on_ranks


def rank_counts(world: Any, j: Any, plan: Plan) -> dict[str, tuple[int, int]]:
    """What the collectives of a step come to; not of the first, in which torch tries every connection."""
    par, pipe = build(world, j, plan)
    for _ in range(2):
        for _, p in par.trainable():
            p.grad = None
        with Collectives() as seen:
            sums = torch.stack([step(j, par, pipe), grad_norm.build(par).squared(), torch.tensor(0.0)])
            torch.distributed.all_reduce(sums)  # as runtime.loop does: test_traffic holds the two together
    return seen.totals()


def planned(plan: Plan) -> list[dict[str, tuple[int, int]]]:
    """The same of the plan, rank by rank."""
    ranks = range(plan.sizes.grid.size)
    return [{t.kind: (t.count, t.nbytes) for t in plan.estimate.traffic if t.rank == r} for r in ranks]


def assert_as_planned(j: Any) -> list[dict[str, tuple[int, int]]]:
    plan = plan_job(j)
    want = planned(plan)
    got = on_ranks(plan.sizes.grid.size, rank_counts, j, plan)
    assert got == want, f"{got} != {want}"
    return want
