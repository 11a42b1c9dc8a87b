"""Autocast in the code between modules acts on the device, although the code is recorded for the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.planner.plan_job import plan_job
from tests.fake_accelerator.on_devices.processes import apart, on_devices
from tests.gpu import rank_work
from tests.parity import own

STAGES: dict[str, int | dict[str, int]] = {
    "together": {"a": 0, "b": 0, "head": 1},
    "apart": {"a": 0, "b": 1, "head": 1},
}


@pytest.mark.parametrize("stages", STAGES)
def test_autocast_of_the_tensors_own_device_casts_on_the_device(stages: str) -> None:
    """bfloat16 changes the loss in its third digit."""
    losses: list[float] = []
    for cut in (1, STAGES[stages]):
        j: Any = own("habit_nets.Autocast", [6], stages=cut, train__batch_size=4, train__precision="fp32")
        world = on_devices(1 if cut == 1 else 2, rank_work.one_step, j, apart(plan_job, j))
        losses.append(world[0][0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
