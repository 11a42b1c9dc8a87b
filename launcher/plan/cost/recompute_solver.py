"""Which blocks of a pipeline rank run again, and by which policy: the cheapest choice that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations_with_replacement

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


Cost = tuple[int, int]
"""Flops run again, and the number of blocks that do: of equal flops the fewer."""


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


def _mixtures(group: Alike) -> Iterator[tuple[Cost, Choice]]:
    ways = sorted(group.ways, key=lambda way: (-way.work, way.kept))
    for taken in combinations_with_replacement(ways, len(group.names)):
        cost = (sum(w.flops for w in taken), sum(w.again for w in taken))
        yield cost, {name: way.policy for name, way in zip(group.names, taken, strict=True)}


def _cost(ranked: Sequence[Sequence[tuple[Cost, Choice]]], at: tuple[int, ...]) -> Cost:
    costs = [mixtures[i][0] for mixtures, i in zip(ranked, at, strict=True)]
    return sum(flops for flops, _ in costs), sum(blocks for _, blocks in costs)
