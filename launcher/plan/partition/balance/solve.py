"""Cuts a row of parts into the stages of a pipeline: the shortest step, of the cuts that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from math import comb

from launcher.plan.partition.balance import interleaved, single
from launcher.plan.partition.balance.row import CLOSE, Cut, Row

IDLE = 0.01
"""A stage with less than this share of the mean time has next to nothing to do."""


@dataclass(frozen=True)
class Balance:
    """A ``cut``, and the ``fastest`` one that there would be with enough memory."""

    cut: Cut
    fastest: Cut


def balanced(row: Row, room: int | None = None, likely: Sequence[Cut] = ()) -> Balance:
    """The cut with the shortest step of those that need no more bytes than ``room`` on any rank.

    ``likely``: what ``promising`` says of a row that is like this one but for bytes.

    Of steps as short as the shortest one that with the fewest stages that have next to nothing to do, then
    that with the least memory. Where nothing fits it is the fastest. There are at least as many parts as
    stages.
    """
    row = replace(row, step=cache(row.step), held=cache(row.held))
    fastest = _best(row, likely or promising(row))
    assert fastest is not None
    if room is None or row.memory(fastest) <= room or not row.may_fit(room):
        return Balance(fastest, fastest)

    return Balance(_best(row, promising(row, room)) or fastest, fastest)


def promising(row: Row, room: int | None = None) -> list[Cut]:
    """The cuts within ``room`` to choose from; all of them, if they are few. Without it no bytes count."""
    if comb(row.parts - 1, row.stages - 1) <= row.tries:
        return [c for c in _all(row) if room is None or row.memory(c) <= room]
    if row.stages == len(row.ranks):
        return single.promising(row, room)
    return interleaved.promising(row, room)


def _all(row: Row) -> Iterator[Cut]:
    for ends in combinations(range(1, row.parts), row.stages - 1):
        yield (0, *ends, row.parts)


def _best(row: Row, cuts: Iterable[Cut]) -> Cut | None:
    """Earlier stages have more parts where nothing else tells."""
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
    """Stages with next to nothing to do."""
    least = IDLE * row.both[-1] / row.stages
    return sum(row.both[j] - row.both[i] < least for i, j in pairwise(cut))
