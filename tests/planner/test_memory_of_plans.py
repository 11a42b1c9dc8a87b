"""A process that makes many plans, as a search does, keeps no tensors of earlier ones."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from launcher.planner.plan_job import plan_job
from tests.parity import job, own

JOBS: dict[str, Any] = {
    "one-stage": lambda: job(),
    "stages": lambda: job(parallel={"pipeline": {"stages": 2}}, launch__nproc=2),
    "recomputed": lambda: job(parallel={"recompute": {"modules": ["layers.*"]}}),
    "own": lambda: own("nets.FrozenFirst", ["int64", 5], stages=2, launch__nproc=2),
}


def tensors_after_a_plan(name: str) -> int:
    plan_job(JOBS[name]())
    gc.collect()
    return sum(issubclass(type(some), torch.Tensor) for some in gc.get_objects())


@pytest.mark.parametrize("name", JOBS)
def test_a_plan_leaves_no_tensors_behind(name):
    for _ in range(4):  # the recordings of the last four models are kept, to recognize shared tensors
        before = tensors_after_a_plan(name)
    assert tensors_after_a_plan(name) == before
