"""Cuts a row of parts into the stages of a pipeline with the shortest step that fits in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from math import comb

from launcher.plan.partition.balance import interleaved, single
from launcher.plan.partition.balance.row import CLOSE, Cut, Row

IDLE = 0.01
"""A stage with less than this share of the mean time counts as idle."""


@dataclass(frozen=True)
class Balance:
    """The chosen ``cut``, and the ``fastest`` one with unlimited memory."""

    cut: Cut
    fastest: Cut


def balanced(row: Row, room: int | None = None, likely: Sequence[Cut] = ()) -> Balance:
    """Returns the cut with the shortest step of those that need at most ``room`` bytes on each rank.

    Among steps about as short as the shortest, the cut with the fewest idle stages wins, then the one with
    the least memory. If no cut fits, the result is the fastest one. There must be at least as many parts as
    stages. ``likely``: what ``promising`` returned for a row that differs from this one only in bytes.
    """
    row = replace(row, step=cache(row.step), held=cache(row.held))
    fastest = _best(row, likely or promising(row))
    assert fastest is not None
    if room is None or row.memory(fastest) <= room or not row.may_fit(room):
        return Balance(fastest, fastest)

    return Balance(_best(row, promising(row, room)) or fastest, fastest)


def promising(row: Row, room: int | None = None) -> list[Cut]:
    """Returns the cuts within ``room`` to choose from: all of them if they are few.

    Without ``room`` bytes do not matter.
    """
    if comb(row.parts - 1, row.stages - 1) <= row.tries:
        return [c for c in _all(row) if room is None or row.memory(c) <= room]
    if row.stages == len(row.ranks):
        return single.promising(row, room)
    return interleaved.promising(row, room)


def _all(row: Row) -> Iterator[Cut]:
    for ends in combinations(range(1, row.parts), row.stages - 1):
        yield (0, *ends, row.parts)


def _best(row: Row, cuts: Iterable[Cut]) -> Cut | None:
    """Returns the best of ``cuts``, or ``None``; in a tie, earlier stages have more parts."""
    steps = {cut: row.step(cut) for cut in cuts}
    if not steps:
        return None
    shortest = min(steps.values())
    near = [cut for cut, step in steps.items() if step <= shortest * (1 + CLOSE)]

    def key(cut: Cut) -> tuple[int, int, float, tuple[int, ...]]:
        return (
            _idle(row, cut),
            row.memory(cut),
            round(steps[cut] / (shortest or 1.0), 6),
            tuple(-i for i in cut),
        )

    return min(near, key=key)


def _idle(row: Row, cut: Cut) -> int:
    """Returns the number of idle stages."""
    least = IDLE * row.both[-1] / row.stages
    return sum(row.both[j] - row.both[i] < least for i, j in pairwise(cut))
