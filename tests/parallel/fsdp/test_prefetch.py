"""Weights are gathered group by group ahead of their use, and a module waits for them at the first use.

Gradients that are reduced once a step are reduced group by group during the last backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.job.schema.job import Job
from launcher.plan.communication.gather_order import Gathering
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from tests.parallel.counting import assert_as_planned
from tests.parallel.fsdp.events import rank_events
from tests.parity import assert_parity, batch, build, job, place, step
from tests.ranks import on_ranks

BLOCKS = [f"layers.{n}" for n in range(4)]


def sharded(level: str, **pipeline: Any) -> Job:
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": level}
    return job(parallel={"hsdp": hsdp, "pipeline": {"micro_batch_num": 2, **pipeline}})


@pytest.mark.parametrize("level", ["level1", "level2"])
def test_a_forward_waits_for_what_it_uses_and_no_more(level):
    """All gathers begin before the first forward, as the model is small; each module waits for its own."""
    plan = plan_job(sharded(level))
    one, other = on_ranks(2, rank_events, sharded(level), plan)
    uses = ["root", *BLOCKS, "norm"]
    assert one == other
    assert one[:6] == [f"gather {name}" for name in uses]
    waits = [f"{what} {name}" for name in uses[1:] for what in ("forward", "wait", "done")]
    assert one[6:-1][:17] == ["forward root", "wait root", *waits]
    assert [e for e in one if e.startswith(("gather", "wait"))] == one[:6] + [f"wait {name}" for name in uses]


def test_a_large_group_is_gathered_when_the_previous_one_is_used():
    j = sharded("level1")
    plan = plan_job(j)
    turns = tuple(Gathering(t.group, min(n + 2, 6)) for n, t in enumerate(plan.gathers[0]))
    for events in on_ranks(2, rank_events, j, replace(plan, gathers=(turns,))):
        first = events[: events.index("done norm")]
        assert [e for e in first if not e.startswith("done")] == [
            "gather root", "gather layers.0", "forward root", "wait root",
            "gather layers.1", "forward layers.0", "wait layers.0",
            "gather layers.2", "forward layers.1", "wait layers.1",
            "gather layers.3", "forward layers.2", "wait layers.2",
            "gather norm", "forward layers.3", "wait layers.3",
            "forward norm", "wait norm",
        ]  # fmt: skip


def without(events: list[str], *kinds: str) -> list[str]:
    return [e for e in events if e.split()[0] not in kinds]


def test_level1_reduces_a_group_before_the_backward_of_the_one_before_it():
    one, other = on_ranks(2, rank_events, sharded("level1"), plan_job(sharded("level1")))
    back = ["root", "norm", *reversed(BLOCKS)]
    turns = [f"{what} {name}" for name in back[1:] for what in ("backward", "reduce")]
    assert one == other
    assert without(one, "gather", "wait", "forward", "done") == [
        *(f"backward {name}" for name in back), "backward root", *turns, "reduce root",
    ]  # fmt: skip


def test_without_overlap_all_groups_are_reduced_at_the_end():
    j = sharded("level1")
    off = {"transformer_opt": {"grad_computation_allreduce_overlap": False, "computation_allgather_overlap": False}}
    j = job(parallel=j.parallel.model_dump() | off)
    events, _ = on_ranks(2, rank_events, j, plan_job(j))
    assert [e.split()[0] for e in events[-6:]] == ["reduce"] * 6
    assert events[:6] == ["gather root", "forward root", "wait root", "gather layers.0", "forward layers.0",
                          "wait layers.0"]  # fmt: skip


def test_the_next_stage_of_a_rank_is_gathered_ahead_too():
    cut = {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 2, "layers.3": 3, "norm": 3, "head": 3}
    j = sharded("level1", stages=2, interleave=True, stage_config=cut)
    plan = plan_job(j)
    assert [[plan.groups[t.group].stage for t in turns] for turns in plan.gathers] == [[0, 0, 2], [1, 3, 3, 3]]
    turns = tuple(tuple(Gathering(t.group, min(n + 2, len(own))) for n, t in enumerate(own)) for own in plan.gathers)
    first, _, last, _ = on_ranks(4, rank_events, j, replace(plan, gathers=turns))
    assert first[5:7] == ["gather layers.2", "forward layers.0"]
    assert last[:6] == ["gather layers.1", "gather layers.3", "forward layers.1", "wait layers.1", "done layers.1",
                        "forward layers.1"]  # fmt: skip


def rank_evaluations(world: World, j: Job, plan: Plan) -> list[int]:
    """The number of gathered groups after a step and after each of two evaluations."""
    par, pipe = build(world, j, plan)
    xs, y = batch(j, plan)
    n, at = plan.sizes.local_batch, place(plan, par.meshes)
    mine = slice(at * n, (at + 1) * n)
    out = []
    for _ in range(3):
        if out:
            pipe.evaluate(tuple(x[mine] for x in xs), y[mine], n)
        else:
            step(j, par, pipe)
        out.append(sum(group.is_unsharded for order in par.orders for group in order.groups.values()))
    return out


@pytest.mark.parametrize("level", ["level1", "level2"])
def test_no_weight_stays_whole_after_a_step_or_an_evaluation(level):
    j = sharded(level, stages=2)
    assert on_ranks(4, rank_evaluations, j, plan_job(j)) == [[0, 0, 0]] * 4


KB = 1 / 1024


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, ["norm", "layers.3", "layers.2", "layers.1", "layers.0", "root"]),
        (66 * KB, ["norm, layers.3, layers.2", "layers.1, layers.0", "root"]),
        (17 * KB, ["norm, layers.3", "layers.3, layers.2"]),
    ],
    ids=["as gathered", "two groups", "half a group"],
)
def test_groups_scattered_together_may_be_gathered_separately(size, expected):
    j = sharded("level1")
    fusion = {"reducescatter": {"mode": "size", "config": size}} if size else {}
    j = job(parallel=j.parallel.model_dump() | {"comm_fusion": fusion})
    events, _ = on_ranks(2, rank_events, j, plan_job(j))
    found = [e.removeprefix("reduce ") for e in events if e.startswith("reduce")]
    assert found[: len(expected)] == expected
    assert_as_planned(j)
    assert_parity(j)
