"""Certificates on devices: in several layouts, steps, updates, saves and loads equal those of one process.

The reference runs on the first rank's device. Tied weights must be tied there too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from launcher.data.open import open_data
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Certify
from launcher.plan.certify_copy import Copy, reduced
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.steps.certification.certificate import Certificate
from launcher.steps.certify import examine
from tests.fake_accelerator.on_devices.processes import apart, on_devices
from tests.parity import job
from tests.steps import test_going_on_over_matrices as matrices
from tests.steps.certified import RISING, SHARDED
from tests.test_parity_tp import MEGATRON

STAGES: dict[str, Any] = {"pipeline": {"stages": 2, "micro_batch_num": 2}}
TIED = {**STAGES, "hsdp": {"shard_size": 2, "threshold": 0}}
CASES: dict[str, tuple[Job, Certify]] = {
    "tied over stages, hsdp": (job(parallel=TIED), Certify()),
    "tp over replicas": (job(parallel={"operators": MEGATRON, "grid": {"tp": 2, "dp_replicate": 2}}), Certify()),
    "level3": (job(parallel=SHARDED, model__layers=2), Certify()),
    "zero bubble, muon": (
        job(parallel={"pipeline": {"stages": 2, "scheduler": "zero_bubble_h1"}}, optim={"name": "muon"}),
        Certify(),
    ),
    "device matrices": (matrices.job(matrices.FIRST, "parallel.hsdp=null"), Certify()),
    "an optimizer of the user's own": (
        job(
            parallel=STAGES,
            optim={"_target_": "tests.optim.theirs.IntStep", "lr": 0.01},
            security__allow=("tests",),
        ),
        Certify(),
    ),
    "fp16, with a scale of the loss": (job(parallel=TIED, train__precision="fp16"), Certify(precision="fp16")),
}


def planned(cases: Mapping[str, tuple[Job, Certify]]) -> dict[str, tuple[Copy, Plan]]:
    out = {}
    for name, (asked, step) in cases.items():
        asked = asked.model_copy(update={"schedule": job(schedule=RISING).schedule})
        copy = reduced(asked, step, plan_job(asked).sizes)
        out[name] = (copy, plan_job(copy.job))
    return out


def certify_each(world: World, cases: Mapping[str, tuple[Copy, Plan]], folder: Path) -> dict[str, Certificate | None]:
    found = {}
    for name, (copy, plan) in cases.items():
        try:
            data = open_data(copy.job.data, seed=copy.job.seed, allow=copy.job.security.allow)
            found[name] = examine(world, copy, plan, folder / name.replace(" ", "_"), data)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    return found


@cache
def certificates() -> dict[str, Certificate | None]:
    cases = apart(planned, CASES)
    found: dict[str, Certificate | None] = {}
    with TemporaryDirectory() as folder:
        for size in sorted({plan.sizes.grid.size for _, plan in cases.values()}):
            mine = {name: case for name, case in cases.items() if case[1].sizes.grid.size == size}
            found |= on_devices(size, certify_each, mine, Path(folder))[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_layouts_on_devices_are_certified(case: str) -> None:
    found = certificates()[case]
    assert found is not None
    assert found.holds, found.verdict()
