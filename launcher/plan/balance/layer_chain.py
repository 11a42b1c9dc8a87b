"""A chain of layers, and the pipeline for whose stages it is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

Cut = tuple[int, ...]
"""The first layer of each stage, then the number of layers: stage ``s`` is ``cut[s]`` to ``cut[s + 1]``."""
Run = tuple[int, int, int]
"""A stage, its first layer, and the layer after its last."""

CLOSE = 0.005
"""Steps that differ by a smaller fraction count as equally short."""


@dataclass(frozen=True)
class LayerChain:
    """A chain of layers (``parts``) to cut into stages.

    ``forward`` and ``backward``: the time of each layer for one micro batch. ``places``: the rank of each
    stage. ``ahead``: forwards of each stage before its first backward. ``split``: backwards are split, and
    the second half can wait. ``state``: bytes of each layer during the entire step; ``saved``: bytes of each
    layer for one micro batch; ``flying``: the most micro batches in flight on each stage. ``step`` returns
    the time of a step with a cut; it is called for about ``tries`` cuts. ``rank_bytes`` returns the bytes on
    a rank with these stages, including what layers share.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    places: tuple[int, ...]
    micros: int
    ahead: tuple[int, ...]
    split: bool
    state: tuple[int, ...]
    saved: tuple[int, ...]
    flying: tuple[int, ...]
    step: Callable[[Cut], float] = field(compare=False)
    rank_bytes: Callable[[int, tuple[Run, ...]], int] = field(compare=False)
    tries: int = 200

    @property
    def parts(self) -> int:
        return len(self.forward)

    @property
    def stages(self) -> int:
        return len(self.places)

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        ranks = range(max(self.places) + 1)
        return tuple(tuple(s for s, r in enumerate(self.places) if r == rank) for rank in ranks)

    @cached_property
    def coming(self) -> tuple[tuple[int, ...], ...]:
        """For each number of finished stages, how many stages of each rank are still to come."""
        counts = range(self.stages + 1)
        return tuple(tuple(sum(s >= made for s in mine) for mine in self.ranks) for made in counts)

    @cached_property
    def before(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The forward and backward times of all parts before each one."""
        return tuple(accumulate(self.forward, initial=0.0)), tuple(accumulate(self.backward, initial=0.0))

    @cached_property
    def both(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(*self.before, strict=True))

    @cached_property
    def longest_run(self) -> float:
        """The longest time of a run to consider: longer runs make their rank slow, or the stages uneven."""
        cut = shortest(self)
        if self.stages <= 12:
            return 1.2 * max(self.loads(cut))
        return 1.6 * max(self.both[j] - self.both[i] for i, j in pairwise(cut))

    @cached_property
    def _bytes_before(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(accumulate(self.state, initial=0)), tuple(accumulate(self.saved, initial=0))

    def near_run(self, stage: int, start: int, end: int) -> int:
        """Returns the bytes of a run that are a sum over its layers, without those that layers share."""
        state, saved = self._bytes_before
        return state[end] - state[start] + self.flying[stage] * (saved[end] - saved[start])

    @cached_property
    def near_rest(self) -> tuple[float, ...]:
        """The bytes of each rank in addition to those of its runs, taken from the ``shortest`` cut."""
        cut = shortest(self)
        return tuple(
            float(self.bytes_of(cut, rank) - sum(self.near_run(s, cut[s], cut[s + 1]) for s in mine))
            for rank, mine in enumerate(self.ranks)
        )

    def near_bytes(self, cut: Cut) -> list[float]:
        """Returns the approximate bytes of each rank; this is faster than ``rank_bytes``."""
        out = list(self.near_rest)
        for stage, rank in enumerate(self.places):
            out[rank] += self.near_run(stage, cut[stage], cut[stage + 1])
        return out

    def times(self, cut: Cut) -> list[float]:
        """Returns the time of each stage for one micro batch."""
        ends = [self.both[i] for i in cut]
        return [b - a for a, b in pairwise(ends)]

    def loads(self, cut: Cut) -> list[float]:
        """Returns the time of each rank for one micro batch."""
        times = self.times(cut)
        return [sum([times[s] for s in mine]) for mine in self.ranks]

    def bytes_of(self, cut: Cut, rank: int) -> int:
        return self.rank_bytes(rank, tuple((s, cut[s], cut[s + 1]) for s in self.ranks[rank]))

    def memory(self, cut: Cut) -> int:
        """Returns the bytes on the fullest rank."""
        return max(self.bytes_of(cut, rank) for rank in range(len(self.ranks)))

    def may_fit(self, room: int) -> bool:
        """Returns false only if no cut fits; there may be none even if the result is true.

        This is a lower bound: each part is placed on its cheapest rank, in any order, and the bytes of a rank
        are weighted. It is the dual of a linear program, so any weights are valid; these are one over the
        bytes that a rank would need for all parts.
        """
        few = [min(self.flying[s] for s in mine) for mine in self.ranks]
        weights = [1 / max(1, sum(self.state) + n * sum(self.saved)) for n in few]
        ways = list(zip(few, weights, strict=True))
        least = sum(
            min(weight * (state + n * saved) for n, weight in ways)
            for state, saved in zip(self.state, self.saved, strict=True)
        )
        return least <= room * sum(weights)


def shortest(row: LayerChain) -> Cut:
    """Returns the cut whose longest run is shortest, by bisection of the limit of a run."""
    low, high = 0.0, row.both[-1]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(row, middle) else (middle, high)
    cut = _filled(row, high * (1 + 1e-9))
    assert cut is not None
    return cut


def _filled(row: LayerChain, limit: float) -> Cut | None:
    """Returns the cut in which each run takes as much as ``limit`` allows, or ``None`` if that is too little.

    Each run leaves one part for every later one.
    """
    cut = [0]
    for stage in range(1, row.stages + 1):
        end, last = cut[-1] + 1, row.parts - row.stages + stage
        while end < last and row.both[end + 1] - row.both[cut[-1]] <= limit:
            end += 1
        if row.both[end] - row.both[cut[-1]] > limit:
            return None
        cut.append(end)
    return tuple(cut) if cut[-1] == row.parts else None
