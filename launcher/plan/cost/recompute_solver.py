"""Which blocks of a pipeline rank run again, and by which policy: the cheapest choice that fits."""

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

    ``again``: anything of it runs again.
    """

    policy: str
    flops: int
    kept: int
    work: int
    again: bool = True


@dataclass(frozen=True)
class Alike:
    """Blocks of one stage that are alike, in the order in which they run."""

    names: tuple[str, ...]
    ways: tuple[Way, ...]
    in_flight: int = 1
    """Micro batches of the stage that are kept where most is."""


Cost = tuple[int, int]
"""Flops run again, and the number of blocks that do: of equal flops the fewer."""


MOST = 1000
"""Choices that are few enough to look at each of them."""


def countable(groups: Sequence[Alike]) -> bool:
    """There are no more than ``MOST`` choices."""
    return prod(comb(len(g.names) + len(g.ways) - 1, len(g.names)) for g in groups) <= MOST


def chosen(groups: Sequence[Alike], fits: Callable[[Choice], bool]) -> Choice | None:
    """The ``cheapest`` of choices that can be looked at one by one, else a ``frugal`` one."""
    return cheapest(groups, fits) if countable(groups) else frugal(groups, fits)


def cheapest(groups: Sequence[Alike], fits: Callable[[Choice], bool]) -> Choice | None:
    """The first that ``fits`` of all choices, by what they cost; ``None``: not one does.

    Of alike blocks only their number under each policy is tried. Those come first whose backward takes most:
    it runs when nothing of the blocks behind is kept any more, and the ones before then keep least. No other
    order takes less where a policy that keeps less needs more for its backward.
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

        # what costs least of the rest is one step further in one group
        for n, i in enumerate(at):
            further = (*at[:n], i + 1, *at[n + 1 :])
            if i + 1 < len(ranked[n]) and further not in seen:
                seen.add(further)
                heappush(waiting, (_cost(ranked, further), further))
    return None


@dataclass(frozen=True)
class _Step:
    """One more block of a group has the next policy; ``price``: flops of a byte that it frees."""

    price: float
    group: int
    leaner: int


def frugal(groups: Sequence[Alike], fits: Callable[[Choice], bool]) -> Choice | None:
    """A choice that ``fits`` and costs little: bytes are bought where they are cheapest, block by block.

    As many as it takes are found by halving: what fits does so with more bytes free. Then each kind of step
    that is not needed after all is taken back. No more than one block from the cheapest where bytes kept are
    all that counts (the relaxed knapsack's bound).
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
    """All blocks under one policy: what keeps least may need most for a backward."""
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
    """The ways that are worth it: each keeps less than the one before, at a price that only rises."""
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
    """As many blocks took the step before ``without`` as the one after it."""
    here, after = (
        sum(s.group == without.group and s.leaner == without.leaner + i for s in steps) for i in (0, 1)
    )
    return here >= after


def _after(
    groups: Sequence[Alike], leaner: Sequence[Sequence[Way]], taken: Counter[tuple[int, int]]
) -> Choice:
    """Of a group those blocks first whose backward takes most, as in ``cheapest``."""
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
