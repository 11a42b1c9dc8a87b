"""The memory charts show the memory of the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from launcher.job.schema.cluster import Cluster
from launcher.plan.memory.memory_curves import MemoryCurve, MemoryPeriod, curves
from launcher.plan.plan import Estimate, Plan
from launcher.plan.schedule.simulate import Timeline
from launcher.plan.show.memory_svg import HIGH, LEFT, ROW, TOP, WIDE, svg
from launcher.planner.plan_job import plan_job
from tests.parity import job

SVG = "{http://www.w3.org/2000/svg}"


def shards(level: str) -> dict[str, Any]:
    return {"shard_size": 2, "optimizer_level": level, "threshold": 0}


PARALLEL: dict[str, dict[str, Any]] = {
    "one stage": {"pipeline": {"micro_batch_num": 4}},
    "1f1b": {"pipeline": {"stages": 2, "micro_batch_num": 4}},
    "gpipe, replicas": {"pipeline": {"stages": 2, "scheduler": "gpipe"}, "grid": {"dp_replicate": 2}},
    "interleaved": {"pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 4}},
    "hsdp level1": {"pipeline": {"stages": 2, "micro_batch_num": 4}, "hsdp": shards("level1")},
    "hsdp level2": {"pipeline": {"stages": 2, "micro_batch_num": 4}, "hsdp": shards("level2")},
    "hsdp level3": {"pipeline": {"stages": 2, "micro_batch_num": 4}, "hsdp": shards("level3")},
    "zero bubble": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4}},
    "zero bubble, hsdp": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v"}, "hsdp": shards("level1")},
    "pieces": {"pipeline": {"stages": 2, "scheduler": "seqpipe", "seq_chunks": 2}},
}
layouts = pytest.mark.parametrize("layout", PARALLEL)


@cache
def plan(layout: str) -> Plan:
    return plan_job(job(parallel=PARALLEL[layout], train__batch_size=16, data__seq_len=8))


def drawn(found: Estimate, made: Plan, timeline: Timeline | None = None, after: float = 0.0) -> tuple[MemoryCurve, ...]:
    return curves(found.loads, found.memory, made.sizes.grid, timeline=timeline, after=after)


@layouts
@pytest.mark.parametrize("timed", [False, True], ids=["in order", "in time"])
def test_the_highest_point_of_a_chart_is_the_total_of_its_rank(layout: str, timed: bool) -> None:
    made = plan(layout)
    found, grid = made.estimate, made.sizes.grid
    charts = drawn(found, made, found.timeline if timed else None, after=1.0)
    assert [c.ranks for c in charts] == [grid.ranks(pp=pp) for pp in range(grid["pp"])]
    for c in charts:
        assert c.fullest.nbytes == found.memory[c.rank].total == max(found.memory[r].total for r in c.ranks)
        assert c.always == found.memory[c.rank].params + found.memory[c.rank].optimizer
        assert min(s.nbytes for s in c.spans) >= c.always


@layouts
def test_a_chart_goes_on_from_the_start_of_the_step_to_its_end(layout: str) -> None:
    made = plan(layout)
    timeline = made.estimate.timeline
    for c, row in zip(drawn(made.estimate, made), made.schedule, strict=True):
        assert [(s.start, s.end) for s in c.spans] == [(n, n + 1) for n in range(len(row) + 2)]
    for pp, c in enumerate(drawn(made.estimate, made, timeline, 1.0)):
        assert (c.spans[0].start, c.spans[-1].end) == (0.0, timeline.makespan + 1.0)
        assert all(a.end == b.start for a, b in pairwise(c.spans))
        busy = {(s.start, s.end) for s in c.spans}
        assert {(e.start, e.end) for e in timeline.events if e.rank == pp} <= busy


def test_between_two_actions_no_more_is_held_than_in_them() -> None:
    made = plan("1f1b")
    timeline = made.estimate.timeline
    idle = [
        (before.nbytes, span.nbytes, later.nbytes)
        for pp, c in enumerate(drawn(made.estimate, made, timeline))
        for before, span, later in zip(c.spans, c.spans[1:], c.spans[2:], strict=False)
        if span.start not in {e.start for e in timeline.events if e.rank == pp}
    ]
    assert idle
    assert all(held <= min(before, later) for before, held, later in idle)


@layouts
def test_a_picture_has_a_chart_a_rank_with_the_bytes_of_its_peak(layout: str) -> None:
    made = plan(layout)
    charts = drawn(made.estimate, made)
    root = ElementTree.fromstring(svg(charts))
    said = [p.findtext(f"{SVG}title") for p in root.iter(f"{SVG}path") if p.find(f"{SVG}title") is not None]
    assert said == [f"rank {c.rank}: {made.estimate.memory[c.rank].total} bytes at most" for c in charts]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for at in (e.attrib for e in root.iter() if "x" in e.attrib):
        assert 0 <= float(at["x"]) <= float(at["x"]) + float(at.get("width", 0)) <= width
        assert 0 <= float(at["y"]) <= float(at["y"]) + float(at.get("height", 0)) <= height


GB = 1 << 30
TWO = (
    MemoryCurve(0, (0, 1), 1 * GB, (MemoryPeriod(0, 1, 2 * GB), MemoryPeriod(1, 3, 8 * GB), MemoryPeriod(3, 4, GB))),
    MemoryCurve(2, (2,), 1 * GB, (MemoryPeriod(0, 2, 2 * GB), MemoryPeriod(2, 4, 4 * GB))),
)


def test_a_picture_says_what_it_shows() -> None:
    assert [t.text for t in ElementTree.fromstring(svg(TWO, 10 * GB, seconds=True)).iter(f"{SVG}text")] == [
        "Memory over one step: 2 pipeline ranks, at most 8.0 GB of 10.0 GB on a device",
        "each chart is of the fullest rank of a pipeline rank; its peak is the total in the plan",
        "weights and optimizer", "gradients, gathered weights, activations", "memory of a device, 10.0 GB",
        "ranks 0-1", "0 GB", "10 GB", "8.0 GB",
        "rank 2", "0 GB", "10 GB", "4.0 GB",
        "0", "0.5", "1", "1.5", "2", "2.5", "3", "3.5", "4", "seconds",
    ]  # fmt: skip


def test_a_chart_rises_to_what_is_held_below_the_line_of_what_there_is() -> None:
    text = svg(TWO, 16 * GB)
    quarter = WIDE // 4
    assert f'd="M0 {HIGH}V63.0h{quarter}V36.0h{2 * quarter}V67.5h{quarter}V{HIGH}z"' in text
    assert [f'd="M{LEFT} {TOP + ROW * i:.1f}h{WIDE}" stroke="#cf222e"' in text for i in (0, 1)] == [True, True]
    assert "stroke-dasharray" not in svg(TWO)
    assert "actions, in their order" in text


def test_a_pixel_shows_the_most_that_is_held_in_its_time() -> None:
    busy = tuple(MemoryPeriod(n / 100, (n + 1) / 100, GB * (1 + n % 10)) for n in range(100_000))
    text = svg([MemoryCurve(0, (0,), 0, busy)])
    assert f'd="M0 {HIGH}V0.0h{WIDE}V{HIGH}z"' in text
    assert len(svg([replace(TWO[0], spans=busy)] * 64)) < 100_000


def test_a_cluster_of_which_the_memory_is_told_has_a_line_there() -> None:
    asked = job(parallel=PARALLEL["1f1b"], train__batch_size=16, data__seq_len=8)
    made = plan_job(asked.model_copy(update={"cluster": Cluster(memory_gb=1)}))
    assert "memory of a device, 1.0 GB" in svg(drawn(made.estimate, made), made.estimate.room)
