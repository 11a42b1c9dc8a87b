"""What a round of calibration measures if the ranks are not equally fast."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from launcher.extras.calibration.constants import TimedBlock, TimedCollective
from launcher.extras.calibration.kernels import TimedWork, one_round, prepared
from launcher.runtime.cluster.world import World
from tests.ranks import here

SLOW = 0.5


def rounds(world: World) -> dict[bool, float]:
    """Two samples: both ranks take part in the first, and only the fast rank takes part in the other."""

    def work() -> None:
        time.sleep(SLOW * world.rank)

    samples = [TimedWork(TimedBlock(alone=False), work), TimedWork(TimedBlock(alone=True), work, in_it=world.rank == 0)]
    found = one_round(samples, torch.device("cpu"))
    return {what.alone: seconds for what, seconds in found.items() if isinstance(what, TimedBlock)}


def test_a_measurement_is_that_of_the_slowest_rank_taking_part() -> None:
    first, second = here(rounds, 2)
    assert first == second
    assert first[False] >= SLOW
    assert first[True] < first[False]


def collectives(world: World) -> tuple[int, float]:
    """A collective that one rank joins late."""
    flat = torch.zeros(10)
    device = torch.device("cpu")
    what = TimedCollective("inside", "all_reduce", 40, 2)
    late = TimedWork(
        what, lambda: dist.all_reduce(flat), joint=True, before=lambda: time.sleep(SLOW * world.rank), least=3 * SLOW
    )
    ready = prepared(late, device)
    return ready.times, one_round([ready, TimedWork(TimedBlock(alone=False), lambda: time.sleep(0.01))], device)[what]


def test_a_collective_after_something_else_is_what_it_takes_the_last_one() -> None:
    """``before`` counts for the number of repetitions, but not for the measured seconds."""
    first, second = here(collectives, 2)
    assert first == second
    times, seconds = first
    assert times <= 3
    assert 0 < seconds < SLOW
