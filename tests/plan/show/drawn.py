"""Simulated schedules for tests that draw them."""

from __future__ import annotations

import pytest

from launcher.plan.schedule import schedules
from launcher.plan.schedule.lanes import Lane, Part, Stretch
from launcher.plan.schedule.schedules import Action
from launcher.plan.schedule.simulate import Cost, Timeline, simulate


def drawn(scheduler: str, ranks: int, chunks: int, micros: int, transfer: float = 0.0) -> Timeline:
    n = ranks * chunks
    cost = Cost((1.0,) * n, (2.0,) * n, (1,) * n, transfer)
    return simulate(schedules.build(scheduler, ranks, chunks, micros), schedules.placement(ranks, chunks), cost)


def split() -> Timeline:
    """One rank runs one micro batch, with its backward in two halves."""
    row = (Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0))
    return simulate((row,), (0,), Cost((1.0,), (2.0,), (1,)))


def lanes(timeline: Timeline) -> tuple[Lane, Lane]:
    """Return a lane with the last tenth of each action, and one whose stretches end after the schedule.

    The second has one stretch per rank.
    """
    ends = [Stretch(e.rank, e.end - (e.end - e.start) / 10, e.end, f"{e.action}: over tp") for e in timeline.events]
    parts = (Part("all_gather", 4, 3 << 30, 1.5), Part("reduce_scatter", 1, 1 << 20, 1.0))
    late = max(0.0, timeline.makespan - 1.0)
    sums = tuple(Stretch(r, late, late + 2.5, "weights", parts) for r in range(len(timeline.busy)))
    return Lane("tp", "collectives over tp", tuple(ends)), Lane("data-parallel", "gradients and weights", sums)


NOTHING = simulate(((),), (0,), Cost((1.0,), (2.0,), (1,)))
TIMELINES = {
    "gpipe": drawn("gpipe", 2, 1, 3),
    "1f1b": drawn("1f1b", 4, 1, 4),
    "interleaved": drawn("1f1b", 2, 3, 5),
    "one rank": drawn("1f1b", 1, 1, 12),
    "many": drawn("1f1b", 12, 1, 100),
    "split": split(),
    "nothing": NOTHING,
}
every = pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES)
