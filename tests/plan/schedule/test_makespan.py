from __future__ import annotations

from random import Random

import pytest

from launcher.plan.schedule import schedules
from launcher.plan.schedule.simulate import Cost, makespan, order, simulate

KINDS = [
    ("1f1b", 4, 1, 1), ("1f1b", 3, 3, 1), ("gpipe", 2, 2, 1), ("zero_bubble_h1", 4, 1, 1), ("zero_bubble_v", 3, 2, 1),
    ("dualpipe_v", 2, 2, 1), ("seqpipe", 3, 1, 4), ("seqvpp", 4, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize(("scheduler", "ranks", "chunks", "pieces"), KINDS)
def test_a_step_is_as_long_as_it_is_simulated(scheduler: str, ranks: int, chunks: int, pieces: int) -> None:
    places = schedules.placement(ranks, chunks, schedules.RULES[scheduler].v)
    schedule = schedules.build(scheduler, ranks, chunks, 2 * ranks * chunks, pieces=pieces)
    steps, random = order(schedule, places, pieces), Random(scheduler)
    for transfer in (0.0, 0.3):
        n = len(places) * pieces
        forward, backward, later = ([random.uniform(0.1, 3) for _ in range(n)] for _ in range(3))
        whole = tuple(b + w for b, w in zip(backward, later, strict=True))
        cost = Cost(tuple(forward), whole, (0,) * n, transfer, weight=tuple(later), pieces=pieces)
        assert makespan(steps, cost) == pytest.approx(simulate(schedule, places, cost).makespan)


def test_half_of_a_backward_is_the_weights_where_nobody_says() -> None:
    places, schedule = (0, 1), schedules.build("zero_bubble_h1", 2, 1, 4)
    cost = Cost((1.0, 2.0), (2.0, 3.0), (0, 0))
    assert makespan(order(schedule, places), cost) == simulate(schedule, places, cost).makespan
