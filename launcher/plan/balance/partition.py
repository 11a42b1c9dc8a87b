"""Splits a chain of layers into pipeline stages: exactly, or by beam search for interleaved schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import combinations, islice, pairwise
from math import comb, inf
from typing import NamedTuple

from launcher.plan.balance.layer_chain import CLOSE, Cut, LayerChain, shortest


def promising_single(row: LayerChain, room: int | None) -> list[Cut]:
    """Returns the cuts that fit in ``room`` bytes and may have the shortest step.

    A cut is dropped if a lower bound of its step is too long.
    """

    def bound(stage: int, start: int, end: int) -> float:
        return _bound(row, stage, start, end)

    def fitting(stage: int, start: int, end: int) -> float:
        assert room is not None
        return inf if row.rank_bytes(stage, ((stage, start, end),)) > room else 0.0

    fits = None if room is None else fitting
    limit = row.step(shortest(row)) * (1 + CLOSE)
    for times in (1.0, 1.2, 2.0, inf):
        cuts = _tried(row, by_bound(row, bound, limit * times, fits))
        reach = min((row.step(c) for c in cuts), default=inf) * (1 + CLOSE)
        if cuts and reach > limit * times:  # a cut whose bound exceeds the limit may be shorter
            cuts = _tried(row, by_bound(row, bound, reach, fits))
        if cuts:
            return cuts
    return []


def _tried(row: LayerChain, cuts: Iterator[tuple[float, Cut]]) -> list[Cut]:
    """Returns those of ``cuts`` that could be the best; ``cuts`` are sorted by their bounds."""
    shortest = inf
    out: list[Cut] = []
    for least, cut in islice(cuts, row.tries):
        if least > shortest * (1 + CLOSE):
            break
        shortest = min(shortest, row.step(cut))
        out.append(cut)
    return out


def _bound(row: LayerChain, stage: int, start: int, end: int) -> float:
    """Returns a lower bound of the step time.

    It is the sum of the first micro batch's way to the stage and back, all work of the stage, and its waits.
    Before its first backward the stage can run only ``ahead`` forwards, so it waits; after its last forward
    it waits in the same way. Adding a layer never lowers the bound.
    """
    (forwards, backwards), ahead = row.before, row.ahead[stage]
    f, b = forwards[end] - forwards[start], backwards[end] - backwards[start]

    # with a split backward, other stages send input gradients first and compute weight gradients later
    share = 0.5 if row.split else 1.0
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
"""The bound of a stage with the layers from a start to an end; infinite if no stage may be as long."""


def by_bound(
    row: LayerChain, bound: Bound, limit: float, fits: Bound | None = None
) -> Iterator[tuple[float, Cut]]:
    """Yields cuts with the largest bound of their stages, sorted by it, up to ``limit``."""
    spans = _spans(row, bound, limit, fits)
    ways = _ways(row, spans)

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
        for end, here in spans[stage][cut[-1]].items():
            rest = ways[stage + 1].get(end)
            if rest is not None:
                spread = squares + (row.both[end] - row.both[cut[-1]]) ** 2
                most = max(so_far, here)
                heappush(heap, (max(most, rest), -stage - 1, spread, (*cut, end), most))


def _spans(
    row: LayerChain, bound: Bound, limit: float, fits: Bound | None
) -> list[dict[int, dict[int, float]]]:
    """Returns, for each stage, the bounds within ``limit`` of spans of layers, by their start and end."""
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


def _ways(row: LayerChain, spans: list[dict[int, dict[int, float]]]) -> list[dict[int, float]]:
    """Returns, for each stage and first layer, the smallest bound of this stage and all later ones."""
    ways: list[dict[int, float]] = [{} for _ in range(row.stages)] + [{row.parts: 0.0}]
    for stage in range(row.stages - 1, -1, -1):
        rest = ways[stage + 1]
        for start, ends in spans[stage].items():
            bounds = [max(least, rest[end]) for end, least in ends.items() if end in rest]
            if bounds:
                ways[stage][start] = min(bounds)
    return ways


MANY = 12
"""With more stages, only some changes of a cut are tried, and only cuts with stages of similar length."""
WORK = 4_000
"""The approximate number of spans of layers to examine."""
NARROWEST, WIDEST = 2, 64
"""The least and the most cuts to keep of those that end at the same layer."""


class _Begun(NamedTuple):
    """The first stages of a cut, and the time and bytes that they put on each rank.

    ``squares``: the sum of the squared times; ``products``: the sum over ranks of the time so far multiplied
    by the number of stages that the rank still gets.
    """

    cut: Cut
    loads: tuple[float, ...]
    nbytes: tuple[float, ...]
    squares: float
    products: float


def promising_interleaved(row: LayerChain, room: int | None) -> list[Cut]:
    """Returns cuts within ``room`` that may have the shortest step."""

    def key(cut: Cut) -> Key:
        return _key(row, cut, room)

    def fits(cut: Cut) -> bool:
        return room is None or row.memory(cut) <= room

    def in_step(cut: Cut) -> Key:
        return _in_step(row, cut, room)

    cuts = sorted(_beam(row, room), key=key)
    begin = [*cuts[:1], shortest(row)]
    likely = [_refined(row, cut, by) for cut in begin for by in (key, in_step)]
    every = list(dict.fromkeys(filter(fits, (*likely, shortest(row), *cuts))))
    return _around(row, every[: max(4, row.tries // 2)], room)


def _beam(row: LayerChain, room: int | None) -> list[Cut]:
    """Extends cuts stage by stage; of those that end at the same layer it keeps the most even ones."""
    width = NARROWEST
    rest = tuple(row.near_rest)
    begun = [_Begun((0,), (0.0,) * len(rest), rest, 0.0, 0.0)]
    for stage in range(row.stages):
        cells: dict[int, list[tuple[float, Cut, _Begun]]] = {}
        for one in begun:
            for longer in _longer(row, one, room):
                cells.setdefault(longer.cut[-1], []).append((_uneven(row, longer), longer.cut, longer))

        # keep the ends closest to those of equal stages, and as many cuts as ``WORK`` allows
        target = row.both[-1] * (stage + 1) / row.stages
        order = sorted(cells, key=lambda end: abs(row.both[end] - target))
        kept = order if row.stages <= MANY else order[: max(4, WORK // (4 * NARROWEST * row.stages))]
        width = max(width, min(WIDEST, WORK // (row.stages * max(1, len(kept)) ** 2)))
        begun = [one for end in kept for _, _, one in sorted(cells[end], key=_first)[:width]]
    return [one.cut for one in begun]


def _first(candidate: tuple[float, Cut, _Begun]) -> tuple[float, Cut]:
    return candidate[:2]


def _longer(row: LayerChain, begun: _Begun, room: int | None) -> Iterator[_Begun]:
    """Yields the cuts with one more stage."""
    stage, start = len(begun.cut) - 1, begun.cut[-1]
    rank, loads, nbytes = row.places[stage], begun.loads, begun.nbytes
    to_come = row.coming[stage + 1][rank]
    first, last = start + 1, row.parts - row.stages + stage + 1
    for end in range(last if stage == row.stages - 1 else first, last + 1):
        time = row.both[end] - row.both[start]
        if end > first and time > row.longest_run:
            return
        rank_bytes = nbytes[rank] + row.near_run(stage, start, end)
        if room is not None and rank_bytes > room:
            return
        now = loads[rank] + time
        yield _Begun(
            (*begun.cut, end),
            (*loads[:rank], now, *loads[rank + 1 :]),
            (*nbytes[:rank], rank_bytes, *nbytes[rank + 1 :]),
            begun.squares + now**2 - loads[rank] ** 2,
            begun.products + now * to_come - loads[rank] * (to_come + 1),
        )


def _uneven(row: LayerChain, begun: _Begun) -> float:
    """Returns how uneven the ranks will be if all remaining stages are equal, by their squared times."""
    remaining = row.stages - len(begun.cut) + 1
    each = (row.both[-1] - row.both[begun.cut[-1]]) / max(1, remaining)
    return begun.squares + 2 * each * begun.products


Key = tuple[float, float, float]


def _key(row: LayerChain, cut: Cut, room: int | None) -> Key:
    """Returns the sort key of a cut: bytes over ``room``, time of the slowest rank, unevenness of the stages.

    The time counts from the start of the step, so it includes the way to the rank's first stage.
    """
    times = row.times(cut)
    slowest = max(row.both[cut[mine[0]]] + row.micros * sum([times[s] for s in mine]) for mine in row.ranks)
    return _over(row, cut, room), slowest, sum([t * t for t in times])


def _in_step(row: LayerChain, cut: Cut, room: int | None) -> Key:
    """Returns the sort key on the assumption that ranks wait for each other at every stage.

    They do when none runs far ahead.
    """
    times = row.times(cut)
    rounds = sum([max([times[s] for s in stages]) for stages in zip(*row.ranks, strict=True)])
    return _over(row, cut, room), rounds, sum([t * t for t in times])


def _over(row: LayerChain, cut: Cut, room: int | None) -> float:
    """Returns the bytes over ``room`` on all ranks."""
    return 0.0 if room is None else sum(max(0.0, n - room) for n in row.near_bytes(cut))


def _refined(row: LayerChain, cut: Cut, key: Callable[[Cut], Key]) -> Cut:
    """Moves layers from one stage to another as long as ``key`` improves."""
    now = key(cut)
    while True:
        best = min(((key(c), c) for c in _shifts(row, cut)), default=(now, cut))
        if best[0] >= now:
            return cut
        now, cut = best


def _shifts(row: LayerChain, cut: Cut) -> Iterator[Cut]:
    """Yields cuts in which one stage has a layer less and another one more.

    With many stages only some moves are tried: from stages of the slowest ranks to those of the fastest ranks
    and to adjacent stages.
    """
    few = row.stages <= MANY
    loads = row.loads(cut)
    order = sorted(range(len(loads)), key=lambda rank: -loads[rank])
    slow, fast = (order, order) if few else (order[:2], order[-3:])
    for source in (s for rank in slow for s in row.ranks[rank] if cut[s + 1] - cut[s] > 1):
        near = () if few else (source - 1, source + 1)
        targets = {*near, *(t for rank in fast for t in row.ranks[rank])}
        for target in sorted(targets & {*range(row.stages)} - {source}):
            yield _shifted(cut, source, target)


def _shifted(cut: Cut, source: int, target: int) -> Cut:
    """Returns ``cut`` with one layer moved from ``source`` to ``target``; stages between them shift by one.

    >>> _shifted((0, 3, 5, 6), 0, 2), _shifted((0, 1, 2, 6), 2, 0)
    ((0, 2, 4, 6), (0, 2, 3, 6))
    """
    first, last = min(source, target) + 1, max(source, target) + 1
    step = -1 if source < target else 1
    return (*cut[:first], *(i + step for i in cut[first:last]), *cut[last:])


def _around(row: LayerChain, cuts: Sequence[Cut], room: int | None) -> list[Cut]:
    """Returns ``cuts`` and, while tries are left, also cuts near the best one."""
    tried = {cut: row.step(cut) for cut in cuts}
    while 0 < len(tried) < row.tries:
        best = min(tried, key=lambda c: tried[c])
        near = sorted((_key(row, c, room), c) for c in _shifts(row, best) if c not in tried)
        fitting = (c for _, c in near if room is None or row.memory(c) <= room)
        more = list(islice(fitting, row.tries - len(tried)))
        tried |= {c: row.step(c) for c in more}
        if not more or min(tried[c] for c in more) >= tried[best]:
            break
    return list(tried)


IDLE = 0.01
"""A stage with less than this fraction of the mean time counts as idle."""


@dataclass(frozen=True)
class Balance:
    """The chosen ``cut``, and the ``fastest`` one with unlimited memory."""

    cut: Cut
    fastest: Cut


def balanced(row: LayerChain, room: int | None = None, likely: Sequence[Cut] = ()) -> Balance:
    """Returns the cut with the shortest step of those that need at most ``room`` bytes on each rank.

    Among steps about as short as the shortest, the cut with the fewest idle stages wins, then the one with
    the least memory. If no cut fits, the result is the fastest one. There must be at least as many layers as
    stages. ``likely``: the result of ``promising`` for a chain that differs from this one only in bytes.
    """
    row = replace(row, step=cache(row.step), rank_bytes=cache(row.rank_bytes))
    fastest = _best(row, likely or promising(row))
    assert fastest is not None
    if room is None or row.memory(fastest) <= room or not row.may_fit(room):
        return Balance(fastest, fastest)

    return Balance(_best(row, promising(row, room)) or fastest, fastest)


def promising(row: LayerChain, room: int | None = None) -> list[Cut]:
    """Returns the cuts within ``room`` to choose from: all of them if they are few.

    If ``room`` is ``None``, memory is unlimited.
    """
    if comb(row.parts - 1, row.stages - 1) <= row.tries:
        return [c for c in _all(row) if room is None or row.memory(c) <= room]
    if row.stages == len(row.ranks):
        return promising_single(row, room)
    return promising_interleaved(row, room)


def _all(row: LayerChain) -> Iterator[Cut]:
    for ends in combinations(range(1, row.parts), row.stages - 1):
        yield (0, *ends, row.parts)


def _best(row: LayerChain, cuts: Iterable[Cut]) -> Cut | None:
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


def _idle(row: LayerChain, cut: Cut) -> int:
    """Returns the number of idle stages."""
    least = IDLE * row.both[-1] / row.stages
    return sum(row.both[j] - row.both[i] < least for i, j in pairwise(cut))
