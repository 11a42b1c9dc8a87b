"""The bytes and times that stages are chosen by, compared with what the plan with these stages says."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from launcher.job.compose import compose
from launcher.plan.balance.balance import Balanced
from launcher.plan.plan import Plan
from launcher.plan.resolve import stage_config
from launcher.planner.plan_job import plan_job

LM = [
    "recipe=lm_single", "cluster=h100_sxm", "model.layers=10", "model.dim=256", "model.heads=4",
    "model.vocab_size=8000", "data.vocab_size=8000", "data.seq_len=256",
    "train.batch_size=64", "train.precision=bf16", "launch.nproc=4",
    "parallel.pipeline={stages: 4, micro_batch_num: 16}", "steps=[train]",
]  # fmt: skip
PIPE = "parallel.pipeline."
LAYOUTS: dict[str, list[str]] = {
    "1f1b": [],
    "gpipe": [f"{PIPE}scheduler=gpipe"],
    "zero_bubble_h1": [f"{PIPE}scheduler=zero_bubble_h1"],
    "dualpipe_v, tied": [f"{PIPE}scheduler=dualpipe_v", "model.tied=true"],
    "interleaved, level1": [f"{PIPE}interleave=true", "launch.nproc=8", "parallel.hsdp={optimizer_level: level1}"],
    "level2": ["launch.nproc=8", "parallel.hsdp={optimizer_level: level2}"],
    "level3": ["launch.nproc=8", "parallel.hsdp={optimizer_level: level3}"],
    "seqpipe": [f"{PIPE}scheduler=seqpipe", f"{PIPE}seq_chunks=4"],
    "run again": ["parallel.recompute={modules: ['layers.*']}"],
    "fp32": ["train.precision=fp32"],
}


def planned(*words: str) -> tuple[Plan, Balanced]:
    """Return the plan, and the balance by which its stages were chosen."""
    found: list[Balanced] = []
    real = stage_config.balanced_stages

    def kept(*args: Any, **kwargs: Any) -> Balanced:
        found.append(real(*args, **kwargs))
        return found[-1]

    with patch.object(stage_config, "balanced_stages", kept):
        plan = plan_job(compose([*LM, *words]).job)
    return plan, found[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_that_stages_are_chosen_by_is_that_of_the_plan_to_five_percent(layout: str) -> None:
    plan, found = planned(*LAYOUTS[layout])
    ranks = [plan.sizes.grid.ranks(pp=pp) for pp in range(4)]
    real = [max(m.total for m in plan.estimate.memory if m.rank in mine) for mine in ranks]
    assert list(found.rank_bytes) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_time_that_stages_are_chosen_by_is_that_of_the_plan(layout: str) -> None:
    plan, found = planned(*LAYOUTS[layout])
    assert found.step == pytest.approx(plan.estimate.simulated.makespan, rel=1e-3)


def test_without_speeds_the_time_is_that_of_the_schedule() -> None:
    plan, found = planned("cluster=unknown")
    assert found.step == pytest.approx(plan.estimate.timeline.makespan, rel=1e-9)
