"""Chooses which blocks of a pipeline rank run again, and by which policy: the cheapest choice that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations_with_replacement, pairwise
from math import comb, prod

Choice = dict[str, str]
"""The policy of each block."""


@dataclass(frozen=True)
class Way:
    """A block under one policy: ``flops`` run again, bytes ``kept``, bytes of ``work`` in its backward.

    ``again``: some part of it runs again.
    """

    policy: str
    flops: int
    kept: int
    work: int
    again: bool = True


@dataclass(frozen=True)
class Alike:
    """Blocks of one stage that have the same figures, in the order in which they run."""

    names: tuple[str, ...]
    ways: tuple[Way, ...]
    in_flight: int = 1
    """Micro batches of the stage that are kept when most bytes are."""


Cost = tuple[int, int]
"""Flops run again, then the number of blocks that run again: with equal flops, fewer blocks are cheaper."""


MOST = 1000
"""The most choices that are compared one by one."""


def countable(groups: Sequence[Alike]) -> bool:
    """Whether there are at most ``MOST`` choices."""
    return prod(comb(len(g.names) + len(g.ways) - 1, len(g.names)) for g in groups) <= MOST


def chosen(groups: Sequence[Alike], fits: Callable[[Choice], bool]) -> Choice | None:
    """Returns the ``cheapest`` choice if all can be compared, else a ``frugal`` one."""
    return cheapest(groups, fits) if countable(groups) else frugal(groups, fits)


def cheapest(groups: Sequence[Alike], fits: Callable[[Choice], bool]) -> Choice | None:
    """Returns the cheapest choice that ``fits``, or ``None`` if none does.

    For blocks that are alike, only the number of blocks under each policy is varied. The blocks whose
    backward needs most bytes come first: their backward runs when nothing of the later blocks is kept any
    more, and the blocks before them keep least. If a policy that keeps less needs more in its backward, no
    other order needs less memory.
    """
    ranked = [sorted(_mixtures(group), key=lambda mixture: mixture[0]) for group in groups]
    start = (0,) * len(ranked)
    waiting: list[tuple[Cost, tuple[int, ...]]] = []
    heappush(waiting, (_cost(ranked, start), start))
    seen = {start}
    while waiting:
        _, at = heappop(waiting)
        choice: Choice = {}
        for mixtures, i in zip(ranked, at, strict=True):
            choice |= mixtures[i][1]
        if fits(choice):
            return choice

        # the cheapest remaining choice is one step further in one group
        for n, i in enumerate(at):
            further = (*at[:n], i + 1, *at[n + 1 :])
            if i + 1 < len(ranked[n]) and further not in seen:
                seen.add(further)
                heappush(waiting, (_cost(ranked, further), further))
    return None


@dataclass(frozen=True)
class _Step:
    """Moves one more block of a group to the next leaner policy; ``price``: flops a byte freed."""

    price: float
    group: int
    leaner: int


def frugal(groups: Sequence[Alike], fits: Callable[[Choice], bool]) -> Choice | None:
    """Returns a choice that ``fits`` and costs little, or ``None``: it frees the cheapest bytes first.

    Bisection finds how many steps it takes, since a choice that fits also fits with more bytes free. Then
    each kind of step that turns out not to be needed is undone. If only kept bytes matter, the result is at
    most one block from the optimum (the bound of the relaxed knapsack problem).
    """
    leaner = [_leaner(group) for group in groups]
    steps = sorted(_steps(groups, leaner), key=lambda step: step.price)

    def after(taken: Sequence[_Step]) -> Choice:
        return _after(groups, leaner, Counter((step.group, step.leaner) for step in taken))

    few, many = 0, len(steps)
    if not fits(after(steps)):
        return _uniform(groups, fits)
    while few < many:
        half = (few + many) // 2
        few, many = (few, half) if fits(after(steps[:half])) else (half + 1, many)

    taken = steps[:many]
    for step in sorted(set(taken), key=lambda step: -step.price):
        fewer = list(taken)
        fewer.remove(step)
        while _stands(fewer, step) and fits(after(fewer)):
            taken = list(fewer)
            if step not in fewer:
                break
            fewer.remove(step)
    return after(taken)


def _uniform(groups: Sequence[Alike], fits: Callable[[Choice], bool]) -> Choice | None:
    """Returns the cheapest choice with one policy for all blocks that fits, or ``None``.

    The policy that keeps least may need most memory in a backward, so each one is tried.
    """
    ways = {way.policy: 0 for group in groups for way in group.ways}
    for group in groups:
        for way in group.ways:
            ways[way.policy] += way.flops * len(group.names)
    every = (
        {name: policy for group in groups for name in group.names}
        for policy in sorted(ways, key=ways.__getitem__)
    )
    return next((choice for choice in every if fits(choice)), None)


def _leaner(group: Alike) -> list[Way]:
    """Returns the ways on the lower convex hull: each keeps less than the one before, at a rising price."""
    out: list[Way] = []
    for way in sorted(group.ways, key=lambda w: (w.flops, w.again, w.kept)):
        if out and way.kept >= out[-1].kept:
            continue
        while len(out) > 1 and _price(out[-2], way, 1) <= _price(out[-2], out[-1], 1):
            out.pop()
        out.append(way)
    return out


def _price(one: Way, other: Way, in_flight: int) -> float:
    return (other.flops - one.flops) / ((one.kept - other.kept) * max(in_flight, 1))


def _steps(groups: Sequence[Alike], leaner: Sequence[Sequence[Way]]) -> Iterator[_Step]:
    for n, (group, ways) in enumerate(zip(groups, leaner, strict=True)):
        for i, (one, other) in enumerate(pairwise(ways), 1):
            yield from [_Step(_price(one, other, group.in_flight), n, i)] * len(group.names)


def _stands(steps: Sequence[_Step], without: _Step) -> bool:
    """Whether the steps are still consistent: no block takes a later step without the one in ``without``."""
    here, after = (
        sum(s.group == without.group and s.leaner == without.leaner + i for s in steps) for i in (0, 1)
    )
    return here >= after


def _after(
    groups: Sequence[Alike], leaner: Sequence[Sequence[Way]], taken: Counter[tuple[int, int]]
) -> Choice:
    """Returns the choice after the steps ``taken``.

    In a group the blocks whose backward needs most bytes come first, as in ``cheapest``.
    """
    out: Choice = {}
    for n, (group, ways) in enumerate(zip(groups, leaner, strict=True)):
        reached = [len(group.names), *(taken[n, i] for i in range(1, len(ways))), 0]
        each = [way for i, way in enumerate(ways) for _ in range(reached[i] - reached[i + 1])]
        each.sort(key=lambda way: (-way.work, way.kept))
        out |= {name: way.policy for name, way in zip(group.names, each, strict=True)}
    return out


def _mixtures(group: Alike) -> Iterator[tuple[Cost, Choice]]:
    ways = sorted(group.ways, key=lambda way: (-way.work, way.kept))
    for taken in combinations_with_replacement(ways, len(group.names)):
        cost = (sum(w.flops for w in taken), sum(w.again for w in taken))
        yield cost, {name: way.policy for name, way in zip(group.names, taken, strict=True)}


def _cost(ranked: Sequence[Sequence[tuple[Cost, Choice]]], at: tuple[int, ...]) -> Cost:
    costs = [mixtures[i][0] for mixtures, i in zip(ranked, at, strict=True)]
    return sum(flops for flops, _ in costs), sum(blocks for _, blocks in costs)
