"""The collectives of a real step, rank by rank, compared with those of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from launcher.parallel import grad_norm
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.testing.meters import CollectiveMeter
from tests.parity import build, step
from tests.ranks import on_ranks

K = TypeVar("K")


def rank_counts(world: Any, j: Any, plan: Plan) -> dict[str, tuple[int, int]]:
    """Counts and bytes of the collectives of a second step; in the first, torch tries every connection."""
    par, pipe = build(world, j, plan)
    for _ in range(2):
        for _, p in par.trainable():
            p.grad = None
        with CollectiveMeter() as seen:
            sums = torch.stack([step(j, par, pipe), grad_norm.build(par).squared(), torch.tensor(0.0)])
            torch.distributed.all_reduce(sums)  # as runtime.loop does: test_traffic asserts that both are equal
    return seen.totals()


def planned(plan: Plan) -> list[dict[str, tuple[int, int]]]:
    """Counts and bytes of the collectives in the plan, rank by rank."""
    ranks = range(plan.sizes.grid.size)
    return [{t.kind: (t.count, t.nbytes) for t in plan.estimate.traffic if t.rank == r} for r in ranks]


def assert_as_planned(j: Any) -> list[dict[str, tuple[int, int]]]:
    plan = plan_job(j)
    want = planned(plan)
    got = on_ranks(plan.sizes.grid.size, rank_counts, j, plan)
    assert got == want, f"{got} != {want}"
    return want


def all_counts(world: Any, cells: Mapping[K, tuple[Any, Plan]]) -> dict[K, dict[str, tuple[int, int]]]:
    """The collectives of each cell, one cell after another."""
    return {k: rank_counts(world, j, plan) for k, (j, plan) in cells.items()}


def assert_all_as_planned(jobs: Mapping[K, Any]) -> dict[K, Plan]:
    """Assert that each job sends what is planned, and return the plans; ranks are forked once per world size."""
    plans = {k: plan_job(j) for k, j in jobs.items()}
    for size in {p.sizes.grid.size for p in plans.values()}:
        cells = {k: (jobs[k], p) for k, p in plans.items() if p.sizes.grid.size == size}
        ranks = on_ranks(size, all_counts, cells)
        for k, (_, plan) in cells.items():
            got, want = [r[k] for r in ranks], planned(plan)
            assert got == want, f"{k}: {got} != {want}"
    return plans
