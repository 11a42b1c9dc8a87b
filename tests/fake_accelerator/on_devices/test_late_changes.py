"""On devices too, a forward that changes copies of weights ends the step: the check is read with the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from launcher.runtime.training import loop, save
from launcher.steps.model import build_session
from tests.fake_accelerator.on_devices.processes import apart, on_devices
from tests.parallel.test_late_changes import FOLLOW, LOSE, job_of, restarting
from tests.ranks import DRAWN


def steps(world: World, j: Job, plan: Plan, folder: Path) -> str:
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    for _ in range(2):
        loop.step(s, None)
        s.step += 1
    return save.save(s, None).name


@pytest.mark.parametrize("name", LOSE)
def test_a_write_through_data_is_found(name: str, tmp_path: Path) -> None:
    j = job_of(LOSE[name], 4, "write")
    with pytest.raises(RanksFailed) as failed:
        on_devices(LOSE[name].ranks, steps, j, apart(plan_job, j), tmp_path)
    assert failed.value.fault.message.startswith("step 2: the forward changed b.weight, so this layout would")


@pytest.mark.parametrize(
    ("what", "text"),
    [("middle", "step 2: the forward changed b.middle using the"), ("weight", "after step 2 b.weight differs")],
)
def test_changes_made_by_the_samples_of_one_rank_are_detected(what: str, text: str, tmp_path: Path) -> None:
    j = restarting(what, FOLLOW["replicas"])
    with pytest.raises(RanksFailed) as failed:
        on_devices(2, steps, j, apart(plan_job, j), tmp_path)
    assert failed.value.fault.message.startswith(text)


@pytest.mark.parametrize("name", [*LOSE, *FOLLOW])
def test_a_forward_that_changes_nothing_trains(name: str, tmp_path: Path) -> None:
    layout = {**LOSE, **FOLLOW}[name]
    j = job_of(layout, -1, "write")
    assert on_devices(layout.ranks, steps, j, apart(plan_job, j), tmp_path) == ["step-000002"] * layout.ranks
