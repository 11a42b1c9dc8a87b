"""Cuts for one stage a rank: exact, because the wait of a stage depends only on its own run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import islice
from math import inf

from launcher.plan.partition.balance.row import CLOSE, Cut, Row, shortest


def promising(row: Row, room: int | None) -> list[Cut]:
    """Returns the cuts within ``room`` that may have the shortest step, by a lower bound for each run."""

    def bound(stage: int, start: int, end: int) -> float:
        return _bound(row, stage, start, end)

    def fitting(stage: int, start: int, end: int) -> float:
        assert room is not None
        return inf if row.held(stage, ((stage, start, end),)) > room else 0.0

    fits = None if room is None else fitting
    limit = row.step(shortest(row)) * (1 + CLOSE)
    for times in (1.0, 1.2, 2.0, inf):
        found = _tried(row, by_bound(row, bound, limit * times, fits))
        reach = min((row.step(c) for c in found), default=inf) * (1 + CLOSE)
        if found and reach > limit * times:  # longer than the limit, so a cut beyond it may be shorter
            found = _tried(row, by_bound(row, bound, reach, fits))
        if found:
            return found
    return []


def _tried(row: Row, cuts: Iterator[tuple[float, Cut]]) -> list[Cut]:
    """Returns those of ``cuts``, sorted by their bounds, that could be the best one."""
    shortest = inf
    out: list[Cut] = []
    for least, cut in islice(cuts, row.tries):
        if least > shortest * (1 + CLOSE):
            break
        shortest = min(shortest, row.step(cut))
        out.append(cut)
    return out


def _bound(row: Row, stage: int, start: int, end: int) -> float:
    """Returns a lower bound of the step: the way to a stage and back, all its work, and its waits.

    The stage waits for its first backward, with only ``ahead`` forwards to do until then, and likewise at its
    last one. The bound does not decrease with more parts in the run.
    """
    (forwards, backwards), ahead = row.before, row.ahead[stage]
    f, b = forwards[end] - forwards[start], backwards[end] - backwards[start]
    share = 0.5 if row.split else 1.0  # others pass on input gradients first and do the rest later
    earlier = forwards[start] + share * backwards[start]
    later = forwards[-1] - forwards[end] + share * (backwards[-1] - backwards[end])

    first, last = max(0.0, later - (ahead - 1) * f), max(0.0, later - (ahead - 1) * b)
    if row.split:
        waits = first
    elif ahead < row.micros:
        waits = first + last
    else:  # one wait between all forwards and all backwards
        waits = max(first, last)
    return earlier + row.micros * (f + b) + waits


Bound = Callable[[int, int, int], float]
"""The bound of a run; infinite if neither the run nor a longer one is possible."""


def by_bound(row: Row, bound: Bound, limit: float, fits: Bound | None = None) -> Iterator[tuple[float, Cut]]:
    """Yields cuts with the largest bound of their runs, sorted by it, up to ``limit``."""
    runs = _runs(row, bound, limit, fits)
    ways = _ways(row, runs)

    # best-first search: the bound of the remaining stages is exact, so cuts are finished in order
    heap: list[tuple[float, int, float, Cut, float]] = []
    if 0 in ways[0]:
        heap.append((ways[0][0], 0, 0.0, (0,), 0.0))
    while heap:
        least, _, squares, cut, so_far = heappop(heap)
        stage = len(cut) - 1
        if stage == row.stages:
            yield least, cut
            continue
        for end, here in runs[stage][cut[-1]].items():
            rest = ways[stage + 1].get(end)
            if rest is not None:
                spread = squares + (row.both[end] - row.both[cut[-1]]) ** 2
                most = max(so_far, here)
                heappush(heap, (max(most, rest), -stage - 1, spread, (*cut, end), most))


def _runs(row: Row, bound: Bound, limit: float, fits: Bound | None) -> list[dict[int, dict[int, float]]]:
    """Returns the bounds within ``limit`` of each stage's runs, by their start and end."""
    out: list[dict[int, dict[int, float]]] = []
    starts: set[int] = {0}
    for stage in range(row.stages):
        last = row.parts - row.stages + stage + 1
        here: dict[int, dict[int, float]] = {}
        for start in sorted(starts):
            ends: dict[int, float] = {}
            for end in range(last if stage == row.stages - 1 else start + 1, last + 1):
                least = bound(stage, start, end)
                if least > limit or (fits is not None and fits(stage, start, end) == inf):
                    break
                ends[end] = least
            here[start] = ends
        out.append(here)
        starts = {end for ends in here.values() for end in ends}
    return out


def _ways(row: Row, runs: list[dict[int, dict[int, float]]]) -> list[dict[int, float]]:
    """Returns for each stage and its first part the smallest bound of all stages from there on."""
    ways: list[dict[int, float]] = [{} for _ in range(row.stages)] + [{row.parts: 0.0}]
    for stage in range(row.stages - 1, -1, -1):
        rest = ways[stage + 1]
        for start, ends in runs[stage].items():
            found = [max(least, rest[end]) for end, least in ends.items() if end in rest]
            if found:
                ways[stage][start] = min(found)
    return ways
