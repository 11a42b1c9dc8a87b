"""Cuts for several stages a rank: a beam search over the stages, then local improvements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from launcher.plan.partition.balance.row import Cut, Row, shortest

MANY = 12
"""With more stages, only some changes of a cut are tried, and only cuts with stages of similar length."""
WORK = 4_000
"""The approximate number of runs to examine."""
NARROWEST, WIDEST = 2, 64
"""The least and the most cuts to keep of those that end at the same part."""


class _Begun(NamedTuple):
    """The first stages of a cut, with the time and the bytes that each rank has so far.

    ``squares``: the sum of the squared times; ``products``: the sum of each rank's time multiplied by its
    number of stages to come.
    """

    cut: Cut
    loads: tuple[float, ...]
    nbytes: tuple[float, ...]
    squares: float
    products: float


def promising(row: Row, room: int | None) -> list[Cut]:
    """Returns cuts within ``room`` that may have the shortest step."""

    def key(cut: Cut) -> Key:
        return _key(row, cut, room)

    def fits(cut: Cut) -> bool:
        return room is None or row.memory(cut) <= room

    def in_step(cut: Cut) -> Key:
        return _in_step(row, cut, room)

    found = sorted(_beam(row, room), key=key)
    begin = [*found[:1], shortest(row)]
    likely = [_refined(row, cut, by) for cut in begin for by in (key, in_step)]
    every = list(dict.fromkeys(filter(fits, (*likely, shortest(row), *found))))
    return _around(row, every[: max(4, row.tries // 2)], room)


def _beam(row: Row, room: int | None) -> list[Cut]:
    """Extends cuts stage by stage; of those that end at the same part it keeps the most even ones."""
    width = NARROWEST
    rest = tuple(row.near_rest)
    begun = [_Begun((0,), (0.0,) * len(rest), rest, 0.0, 0.0)]
    for stage in range(row.stages):
        cells: dict[int, list[tuple[float, Cut, _Begun]]] = {}
        for one in begun:
            for longer in _longer(row, one, room):
                cells.setdefault(longer.cut[-1], []).append((_uneven(row, longer), longer.cut, longer))

        # keep the ends closest to those of equal stages, and as many cuts as ``WORK`` allows
        wanted = row.both[-1] * (stage + 1) / row.stages
        order = sorted(cells, key=lambda end: abs(row.both[end] - wanted))
        kept = order if row.stages <= MANY else order[: max(4, WORK // (4 * NARROWEST * row.stages))]
        width = max(width, min(WIDEST, WORK // (row.stages * max(1, len(kept)) ** 2)))
        begun = [one for end in kept for _, _, one in sorted(cells[end], key=_first)[:width]]
    return [one.cut for one in begun]


def _first(found: tuple[float, Cut, _Begun]) -> tuple[float, Cut]:
    return found[:2]


def _longer(row: Row, begun: _Begun, room: int | None) -> Iterator[_Begun]:
    """Yields the cuts with one more stage."""
    stage, start = len(begun.cut) - 1, begun.cut[-1]
    rank, loads, nbytes = row.places[stage], begun.loads, begun.nbytes
    to_come = row.coming[stage + 1][rank]
    first, last = start + 1, row.parts - row.stages + stage + 1
    for end in range(last if stage == row.stages - 1 else first, last + 1):
        time = row.both[end] - row.both[start]
        if end > first and time > row.long:
            return
        held = nbytes[rank] + row.near_run(stage, start, end)
        if room is not None and held > room:
            return
        now = loads[rank] + time
        yield _Begun(
            (*begun.cut, end),
            (*loads[:rank], now, *loads[rank + 1 :]),
            (*nbytes[:rank], held, *nbytes[rank + 1 :]),
            begun.squares + now**2 - loads[rank] ** 2,
            begun.products + now * to_come - loads[rank] * (to_come + 1),
        )


def _uneven(row: Row, begun: _Begun) -> float:
    """Returns how uneven the ranks will be if all remaining stages are equal, by their squared times."""
    left = row.stages - len(begun.cut) + 1
    each = (row.both[-1] - row.both[begun.cut[-1]]) / max(1, left)
    return begun.squares + 2 * each * begun.products


Key = tuple[float, float, float]


def _key(row: Row, cut: Cut, room: int | None) -> Key:
    """Returns the bytes over ``room``, the time of the slowest rank, and how uneven the stages are.

    The time includes the way to the rank's first stage.
    """
    times = row.times(cut)
    slowest = max(row.both[cut[mine[0]]] + row.micros * sum([times[s] for s in mine]) for mine in row.ranks)
    return _over(row, cut, room), slowest, sum([t * t for t in times])


def _in_step(row: Row, cut: Cut, room: int | None) -> Key:
    """Returns a key as if ranks waited for each other at every stage, as they do if none runs far ahead."""
    times = row.times(cut)
    rounds = sum([max([times[s] for s in stages]) for stages in zip(*row.ranks, strict=True)])
    return _over(row, cut, room), rounds, sum([t * t for t in times])


def _over(row: Row, cut: Cut, room: int | None) -> float:
    """Returns the bytes over ``room`` on all ranks."""
    return 0.0 if room is None else sum(max(0.0, n - room) for n in row.near_bytes(cut))


def _refined(row: Row, cut: Cut, key: Callable[[Cut], Key]) -> Cut:
    """Moves parts from one stage to another as long as ``key`` improves."""
    now = key(cut)
    while True:
        found = min(((key(c), c) for c in _shifts(row, cut)), default=(now, cut))
        if found[0] >= now:
            return cut
        now, cut = found


def _shifts(row: Row, cut: Cut) -> Iterator[Cut]:
    """Yields cuts in which one stage has a part less and another one more.

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
    """Returns ``cut`` with one part moved from ``source`` to ``target``; stages between them shift by one.

    >>> _shifted((0, 3, 5, 6), 0, 2), _shifted((0, 1, 2, 6), 2, 0)
    ((0, 2, 4, 6), (0, 2, 3, 6))
    """
    first, last = min(source, target) + 1, max(source, target) + 1
    step = -1 if source < target else 1
    return (*cut[:first], *(i + step for i in cut[first:last]), *cut[last:])


def _around(row: Row, found: Sequence[Cut], room: int | None) -> list[Cut]:
    """Returns ``found`` and, while tries are left, also cuts near the best one."""
    tried = {cut: row.step(cut) for cut in found}
    while 0 < len(tried) < row.tries:
        best = min(tried, key=lambda c: tried[c])
        near = sorted((_key(row, c, room), c) for c in _shifts(row, best) if c not in tried)
        fitting = (c for _, c in near if room is None or row.memory(c) <= room)
        more = list(islice(fitting, row.tries - len(tried)))
        tried |= {c: row.step(c) for c in more}
        if not more or min(tried[c] for c in more) >= tried[best]:
            break
    return list(tried)
