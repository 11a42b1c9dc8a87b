"""Where the data decide what runs, every rank gathers and reduces the same weights: exact, idle experts included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.decide import plan_job
from launcher.job.schema import Job
from launcher.plan.plan import Plan
from launcher.runtime.world import World
from launcher.steps.pieces import Piece, error, pieces
from tests.parallel import expert_nets
from tests.parity import build, own, place, whole
from tests.ranks import on_ranks

BATCH, TOKENS, MICROS = 16, 3, 2
ROUTES = {"uneven": [(0,), (0, 1), (1,), (2,)], "all": [(0, 1, 2, 3)] * 4}
"""Which experts each quarter of the batch may go to. Uneven: the last expert is idle on every rank in every micro
batch, and each other one on some rank, or on all for one micro batch."""


def batch(route: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, who may do them, and classes."""
    g = torch.Generator().manual_seed(11)
    x = torch.randn(BATCH, TOKENS, 6, generator=g, dtype=torch.float64)
    who = torch.full((BATCH, TOKENS, 4), -50.0, dtype=torch.float64)
    for quarter, allowed in zip(who.chunk(4), ROUTES[route], strict=True):
        quarter[..., list(allowed)] = 0.5 + torch.rand(*quarter.shape[:2], len(allowed), generator=g).double()
    return x, who, torch.randint(0, 3, (BATCH,), generator=g)


def experts(net: str, stages: int = 1, level: str = "level1", **more: Any) -> Job:
    """A job for the model ``net`` of ``expert_nets``; ``more`` as for ``tests.parity.job``."""
    last = stages - 1
    at = [n * stages // 4 for n in range(4)]
    cut = {"embed": 0, **{f"blocks.{n}": s for n, s in enumerate(at)}, "head": last} if last else {}
    pipeline = {"stages": stages, "micro_batch_num": MICROS} | more.pop("pipeline", {})
    if cut:
        pipeline |= {"stage_config": cut, "stages": stages // pipeline.get("chunks", 1)}
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": level} | more.pop("hsdp", {})
    parallel = {"hsdp": hsdp, "pipeline": pipeline, **more}
    return own(f"expert_nets.{net}", [TOKENS, 6], [TOKENS, 4], stages=1, parallel=parallel, train__batch_size=BATCH)


Step = tuple[list[Piece], list[Piece]]
"""Weights before and gradients after a step, as one rank holds them."""


def rank_step(world: World, cells: Mapping[str, tuple[Job, Plan, str]]) -> dict[str, Step]:
    out = {}
    for key, (j, plan, route) in cells.items():
        try:
            par, pipe = build(world, j, plan)
            before = pieces(par, weights=True)
            n, at = plan.sizes.local_batch, place(plan, par.meshes)
            x, who, y = (t[at * n : (at + 1) * n] for t in batch(route))
            expert_nets.SKIPPED = skipped(at)
            pipe.step((x, who), y)
            out[key] = (before, pieces(par))
        except Exception as error:
            error.add_note(f"in {key}")
            raise
        finally:
            expert_nets.SKIPPED = set()
    return out


def skipped(at: int) -> set[str]:
    """What ``Drops`` leaves out on the data-parallel rank ``at``: one block everywhere, others here or there."""
    return {"blocks.1", ["blocks.0", "blocks.2"][at % 2]}


def oracle(net: str, weights: Mapping[str, Tensor], route: str, replicas: int) -> dict[str, Tensor]:
    """Every gradient of plain torch in one process, micro batch by micro batch; none where it has none."""
    model = getattr(expert_nets, net)().double()
    names = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, w in weights.items():
            names[name].copy_(w)
    parts = replicas * MICROS
    for n, (x, who, y) in enumerate(zip(*(t.chunk(parts) for t in batch(route)), strict=True)):
        expert_nets.SKIPPED = skipped(n // MICROS)
        (F.cross_entropy(model(x, who), y) / parts).backward()
    expert_nets.SKIPPED = set()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_exact(cells: Mapping[str, tuple[str, Job, str]], idle: bool = True) -> None:
    """Each job's gradients are those of one process; ``idle``: and there is none where that has none."""
    made = {k: (j, plan_job(j), route) for k, (_, j, route) in cells.items()}
    for size in {p.sizes.grid.size for _, p, _ in made.values()}:
        mine = {k: c for k, c in made.items() if c[1].sizes.grid.size == size}
        ranks = on_ranks(size, rank_step, mine, timeout_s=120)
        for key, (_, plan, route) in mine.items():
            weights = whole(plan, [p for r in ranks for p in r[key][0]])
            got = whole(plan, [p for r in ranks for p in r[key][1]])
            want = oracle(cells[key][0], weights, route, plan.sizes.replicas)
            if idle:
                assert got.keys() == want.keys(), (key, got.keys() ^ want.keys())
            off = {n: error(got[n], g) for n, g in want.items()}
            assert max(off.values()) <= 1e-12, (key, {n: e for n, e in off.items() if e > 1e-12})


ALONE = {
    f"{net}, {level}, {route}": (net, experts(net, level=level), route)
    for net, route in [("Top1", "uneven"), ("Top1", "all"), ("Top2", "uneven"), ("Lone", "uneven"), ("Skips", "uneven"),
                       ("Shared", "uneven"), ("Exits", "uneven"), ("Permutes", "uneven"), ("Drops", "uneven")]
    for level in ("level1", "level2", "level3")
}  # fmt: skip


def test_one_stage_over_two_shards():
    assert_exact(ALONE)


def many(**layout: Any) -> dict[str, tuple[str, Job, str]]:
    nets = ("Top1", "Top2", "Lone", "Skips", "Shared" if layout.get("stages", 1) > 1 else "Drops")
    return {net: (net, experts(net, **layout), "uneven") for net in nets}


LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"each alone, {n}": {"level": n, "comm_fusion": {"openstate": False}} for n in ("level2", "level3")},
    **{f"fused, {n}": {"level": n, "comm_fusion": {"allgather": {"mode": "size"}}} for n in ("level2", "level3")},
    "2 stages, each alone, level3": {"level": "level3", "stages": 2, "comm_fusion": {"openstate": False}},
    "some whole, level2": {"level": "level2", "hsdp": {"threshold": 1}},
    **{f"2 stages, {n}": {"level": n, "stages": 2} for n in ("level1", "level2", "level3")},
    **{f"2 replicas, {n}": {"level": n, "grid": {"dp_replicate": 2}} for n in ("level1", "level2", "level3")},
    **{f"interleaved, {n}": {"level": n, "stages": 4, "pipeline": {"interleave": True, "chunks": 2}}
       for n in ("level2", "level3")},
    **{f"zero_bubble_h1, {n}": {"level": n, "stages": 2, "pipeline": {"scheduler": "zero_bubble_h1"}}
       for n in ("level1", "level2")},
    "zero_bubble_v, level2": {"level": "level2", "stages": 4,
                              "pipeline": {"scheduler": "zero_bubble_v", "interleave": True, "chunks": 2}},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_in_every_layout(layout):
    assert_exact(many(**layout), idle="stages" not in layout)
