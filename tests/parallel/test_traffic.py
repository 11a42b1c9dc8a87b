"""The collectives of a real step are those of the plan: how many of each kind, and of how many bytes, on every rank."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.training import loop
from launcher.steps.model import build_session
from launcher.testing.meters import CollectiveMeter
from tests.parallel.counting import assert_as_planned, planned
from tests.parity import LM, assert_parity, job, own
from tests.ranks import DRAWN, on_ranks
from tests.tiers import some

LEVELS = ("level1", "level2", "level3")


def hsdp(level: str = "level1", **more: Any) -> dict[str, Any]:
    return {"shard_size": 2, "threshold": 0, "optimizer_level": level, **more}


COUNTS = {
    ("level1", 1): (5, 5), ("level1", 4): (5, 5),
    ("level2", 1): (5, 5), ("level2", 4): (5, 20),
    ("level3", 1): (10, 5), ("level3", 4): (40, 20),
}  # fmt: skip


@pytest.mark.parametrize(("level", "micros"), some(COUNTS, 2))
def test_a_level_takes_so_many_gathers_and_scatters_a_step(level, micros):
    """Four blocks and the rest are five groups."""
    j = job(parallel={"hsdp": hsdp(level), "pipeline": {"micro_batch_num": micros}, "comm_fusion": FOUR_AND_REST})
    first = assert_as_planned(j)[0]
    assert (first["all_gather"][0], first["reduce_scatter"][0]) == COUNTS[level, micros]


KB = 1 / 1024
FOUR_AND_REST: dict[str, Any] = {"allgather": {"mode": "size", "config": 17 * KB}}
FUSION: dict[str, dict[str, Any]] = {
    "auto": {},
    "off": {"openstate": False},
    "all in one": {"allgather": {"mode": "size"}, "allreduce": {"mode": "size"}},
    "sizes": {"allgather": {"mode": "size", "config": 30 * KB}, "allreduce": {"mode": "size", "config": KB / 8}},
    "index": {"allreduce": {"mode": "index", "config": [3, 11]}},
    "fitted": {"network": {"latency_us": 1, "gb_per_s": 1.5}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"grid": {"dp_replicate": 2}},
    **{level: {"hsdp": hsdp(level, threshold=1), "pipeline": {"micro_batch_num": 2}} for level in LEVELS},
    "2 stages, 2x2": {"hsdp": hsdp("level2", threshold=1), "grid": {"dp_replicate": 2}, "pipeline": {"stages": 2}},
    "2 stages, level3": {"hsdp": hsdp("level3", threshold=1), "pipeline": {"stages": 2, "micro_batch_num": 4}},
    "interleaved, level3": {
        "hsdp": hsdp("level3", threshold=1), "pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 4},
    },
}  # fmt: skip


CASES = [*product(FUSION, ("replicas", "interleaved, level3")), *product(("auto", "all in one"), LAYOUTS)]


@pytest.mark.parametrize(("fusion", "layout"), some(dict.fromkeys(CASES)))
def test_every_fusion_of_every_layout_is_counted_as_planned(fusion, layout):
    assert_as_planned(job(parallel=LAYOUTS[layout] | {"comm_fusion": FUSION[fusion]}))


@pytest.mark.parametrize("fusion", some(f for f in FUSION if f != "auto"))
def test_fusion_changes_no_number(fusion):
    assert_parity(job(parallel=LAYOUTS["2 stages, 2x2"] | {"comm_fusion": FUSION[fusion]}))


ODD = {
    "untied": job(model=LM | {"tied": False}, parallel__hsdp=hsdp("level3")),
    "uneven": own("glue_nets.Uneven", [6], stages=1, parallel={"hsdp": hsdp("level2")}),
    "frozen": own("nets.FrozenFirst", ["int64", 5], stages=1, parallel={"hsdp": hsdp("level3")}),
    "frozen tied": own("nets.FrozenTied", ["int64", 5], stages={"embed": 0, "mid": 0, "head": 1}),
    "twice": own("nets.Twice", [6], stages=1, parallel={"hsdp": hsdp("level3")}),
    "unused": own("nets.Unused", [6], stages=1, parallel={"hsdp": hsdp("level3")}),
    **{f"pieces, {level}": job(
        parallel={"pipeline": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2}, "hsdp": hsdp(level)},
        data__seq_len=11, launch__nproc=4,
    ) for level in ("level1", "level3")},
    "zero bubble, level2": job(parallel={
        "pipeline": {"stages": 2, "scheduler": "zero_bubble_v", "micro_batch_num": 4}, "hsdp": hsdp("level2"),
    }),
    "statistics": own("nets.Normed", [2, 6, 6], stages=1, parallel={"grid": {"dp_replicate": 2}}),
}  # fmt: skip


@pytest.mark.parametrize("case", some(ODD))
def test_odd_models_are_counted_as_planned(case):
    assert_as_planned(ODD[case])


def rank_loop(world: Any, j: Any, plan: Plan, folder: Path) -> dict[str, tuple[int, int]]:
    """The collectives of a second step of ``runtime.loop``."""
    live = build_session.build(world, j, plan, folder, drawn=DRAWN)
    loop.step(live, None)
    with CollectiveMeter() as seen:
        loop.step(live, None)
    return seen.totals()


@pytest.mark.parametrize("layout", ["replicas", "level2"])  # with stages, readers also send samples
def test_the_loop_sends_what_is_planned_and_nothing_else(layout, tmp_path):
    j = job(parallel=LAYOUTS[layout])
    plan = plan_job(j)
    assert on_ranks(plan.sizes.grid.size, rank_loop, j, plan, tmp_path) == planned(plan)
