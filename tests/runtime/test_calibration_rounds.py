"""What a round of calibrating tells of ranks that are not equally fast."""

from __future__ import annotations

import time

import torch

from launcher.plan.prediction.calibration.timed import Block
from launcher.runtime.calibration.sample import Sample, one_round
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.start import run_ranks

SLOW = 0.5


def rounds(world: World) -> dict[bool, float]:
    """Of two samples: both ranks are in the first, the one that takes no time by itself in the other."""

    def work() -> None:
        time.sleep(SLOW * world.rank)

    samples = [Sample(Block(alone=False), work), Sample(Block(alone=True), work, in_it=world.rank == 0)]
    found = one_round(samples, torch.device("cpu"))
    return {what.alone: seconds for what, seconds in found.items() if isinstance(what, Block)}


def test_it_tells_how_long_the_slowest_takes_of_those_that_are_in_it() -> None:
    first, second = run_ranks(rounds, 2)
    assert first == second
    assert first[False] >= SLOW
    assert first[True] < first[False]
