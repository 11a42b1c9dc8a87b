"""The memory that a step with recomputed modules really uses on each rank is the memory in the plan."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.planner.plan_job import plan_job
from tests.parallel.cost.test_memory_meter import layout, rank_peaks
from tests.ranks import on_ranks
from tests.tiers import some

FULL: dict[str, Any] = {"modules": "layers.*"}
WAYS = {
    "full": FULL,
    "selective": FULL | {"policy": "selective"},
    "matmul kept": FULL | {"policy": "selective", "keep": ["matmul"]},
    "every other": FULL | {"every": 2},
    "attention": {"modules": "layers.*.attn"},
}
CASES = some([
    ("1f1b", "level2", "full"), ("one stage", "unsharded", "selective"), ("one stage", "level3", "full"),
    *(("one stage", "level2", way) for way in WAYS), *(("1f1b", "level3", way) for way in WAYS),
    ("interleaved", "level2", "full"), ("zero_bubble_h1", "unsharded", "full"), ("dualpipe_v", "unsharded", "full"),
    ("seqpipe", "level3", "attention"),
])  # fmt: skip


@pytest.fixture(scope="module")
def steps() -> dict[tuple[str, str, str], tuple[list[int], list[int]]]:
    """Bytes of each rank, measured and planned."""
    jobs = [layout(pipeline, level, WAYS[way]) for pipeline, level, way in CASES]
    plans = [plan_job(j) for j in jobs]
    got = on_ranks(4, rank_peaks, list(zip(jobs, plans, strict=True)))
    planned = [[m.total for m in p.estimate.memory] for p in plans]
    return dict(zip(CASES, zip(map(list, zip(*got, strict=True)), planned, strict=True), strict=True))


@pytest.mark.parametrize(("pipeline", "level", "way"), CASES)
def test_planned_bytes_of_every_rank_are_within_5_percent_of_measured(steps, pipeline, level, way):
    measured, planned = steps[pipeline, level, way]
    off = [p / m - 1 for m, p in zip(measured, planned, strict=True)]
    assert all(abs(error) <= 0.05 for error in off), [f"{error:+.1%}" for error in off]
