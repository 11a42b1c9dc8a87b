"""A forward that changes weights, or what is trained: refused where ranks cannot follow, by the plan or at the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from launcher.runtime.training import loop
from launcher.steps.model import build_session
from tests.parity import own
from tests.ranks import DRAWN, on_ranks

LATE = 4
"""After the three forwards that a plan tries, within the second step."""


def sharded(level: str) -> dict[str, Any]:
    return {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": level}}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "stages": (2, {}),
    "shards": (1, sharded("level1")),
    "shards, gathered once": (1, sharded("level2")),
    "shards, gathered twice": (1, sharded("level3")),
}


CANNOT_FOLLOW = [name for name in LAYOUTS if name != "one rank"]


def asked(layout: str, at: int, change: str = "freeze") -> Job:
    stages, parallel = LAYOUTS[layout]
    cut = {"a": 0, "b": stages - 1, "head": stages - 1}
    pipeline = {"pipeline": {"stages": stages, "stage_config": cut if stages > 1 else "auto", "micro_batch_num": 2}}
    model = {"_target_": "tests.parallel.late_change_nets.Changes", "change": change, "at": at}
    return own(
        "late_change_nets.Changes", [6], stages=cut, model=model, parallel=parallel | pipeline, train__batch_size=8
    )


@pytest.mark.parametrize("layout", CANNOT_FOLLOW)
def test_what_a_plan_sees_it_refuses(layout: str) -> None:
    with pytest.raises(RequestError, match=r"the forward of b sets whether b\.weight requires a gradient, and"):
        plan_job(asked(layout, 0))


def rank_steps(world: World, j: Job, plan: Plan, folder: Path) -> list[bool]:
    """Whether the weight had a gradient at each step."""
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    weight = {placed.name: t for placed, t in s.model.named()}.get("b.weight")
    had = []
    for _ in range(3):
        loop.step(s, None)
        had.append(weight is not None and weight.grad is not None)
        s.step += 1
    return had


@pytest.mark.parametrize("layout", CANNOT_FOLLOW)
def test_what_a_later_call_does_ends_the_step(layout: str, tmp_path: Path) -> None:
    j = asked(layout, LATE)
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, rank_steps, j, plan_job(j), tmp_path)
    assert failed.value.fault.message == (
        "step 2: the forward set whether b.weight requires a gradient; shards and stages cannot follow. The weights "
        "were not touched: freeze it in the constructor, detach() its output, or train on one rank"
    )


@pytest.mark.parametrize("change", ["halve", "replace"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("shards")])
def test_values_that_a_later_call_changes_are_not_lost_silently(layout: str, change: str, tmp_path: Path) -> None:
    j = asked(layout, LATE, change)
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, rank_steps, j, plan_job(j), tmp_path)
    assert failed.value.fault.message == (
        "step 2: the forward changed b.weight, which is sharded, so the change would be lost. The weights were not "
        "touched: let the forward compute with a copy, or shard nothing (parallel.hsdp=null)"
    )


def test_one_rank_follows(tmp_path: Path) -> None:
    j = asked("one rank", LATE)
    assert on_ranks(1, rank_steps, j, plan_job(j), tmp_path) == [[True, True, False]]
