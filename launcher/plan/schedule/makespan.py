"""The makespan of one schedule under many costs; its dependencies are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan.schedule.actions import Action, Schedule
from launcher.plan.schedule.simulate import Cost

KINDS = "FBIW"


@dataclass(frozen=True)
class Order:
    """The actions of a schedule in topological order.

    ``steps`` has for each action the index of its time in ``_times``, the index of the action before it on
    its rank, the index of the action whose result it takes, and whether that comes from another rank. An
    index of -1 means that there is none.
    """

    steps: tuple[tuple[int, int, int, bool], ...]
    stages: int
    pieces: int


def order(schedule: Schedule, place: tuple[int, ...], pieces: int = 1) -> Order:
    """Returns the order of a schedule, which must not deadlock; ``place``: the rank of each stage."""
    ready: dict[tuple[int, str, int], int] = {}
    steps: list[tuple[int, int, int, bool]] = []
    at, last = [0] * len(schedule), [-1] * len(schedule)
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(schedule):
            while at[rank] < len(row):
                action = row[at[rank]]
                source = _source(action, len(place))
                if source is not None and source not in ready:
                    break
                taken = -1 if source is None else ready[source]
                far = source is not None and place[source[0]] != rank
                steps.append((_time(action, len(place), pieces), last[rank], taken, far))
                last[rank] = len(steps) - 1
                ready[action] = last[rank]
                if action.kind == "I":  # passes on the same gradient as a full backward
                    ready[action.stage, "B", action.micro] = last[rank]
                at[rank] += 1
                moving = True
    assert len(steps) == sum(map(len, schedule)), "the schedule deadlocks"
    return Order(tuple(steps), len(place), pieces)


def _source(a: Action, stages: int) -> tuple[int, str, int] | None:
    """Returns the action of another stage whose result ``a`` takes, or ``None``.

    The forward of a backward needs no check: it precedes it on the same rank.
    """
    if a.kind == "F":
        return (a.stage - 1, "F", a.micro) if a.stage else None
    if a.kind == "W" or a.stage == stages - 1:
        return None
    return (a.stage + 1, "B", a.micro)


def _time(a: Action, stages: int, pieces: int) -> int:
    return (KINDS.index(a.kind) * stages + a.stage) * pieces + a.micro % pieces


def makespan(order: Order, cost: Cost) -> float:
    """Returns the same makespan as ``simulate``."""
    times = _times(order, cost)
    transfer = cost.transfer
    ends = [0.0] * (len(order.steps) + 1)  # index -1 reads the last one, which stays 0
    for i, (time, before, taken, far) in enumerate(order.steps):
        start = ends[before]
        arrival = ends[taken] + transfer if far else ends[taken]
        ends[i] = (start if start > arrival else arrival) + times[time]
    return max(ends)


def _times(order: Order, cost: Cost) -> Sequence[float]:
    later = cost.weight or tuple(b / 2 for b in cost.backward)
    inputs = tuple(b - w for b, w in zip(cost.backward, later, strict=True))
    return (*cost.forward, *cost.backward, *inputs, *later)
