"""A row of parts, and the pipeline that it is cut for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

Cut = tuple[int, ...]
"""Where each run of parts begins, and how many parts there are: run ``s`` is ``cut[s]`` to ``cut[s + 1]``."""
Run = tuple[int, int, int]
"""A stage, its first part, and the one after its last."""

CLOSE = 0.005
"""Steps that differ by less are equally short."""


@dataclass(frozen=True)
class Row:
    """``forward`` and ``backward``: time of each part, of one micro batch.

    ``places``: the rank of each stage. ``ahead``: forwards of each stage before its first backward;
    ``split``: backwards come in halves, of which the second can wait. ``state`` and ``saved``: bytes of each
    part, all along and a micro batch, of which there are at most ``flying`` on each stage. ``step``: the time
    of a whole step of a cut; ``held``: bytes on a rank that has these runs, also of what parts have together.
    About ``tries`` cuts are tried out by ``step``.
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
    held: Callable[[int, tuple[Run, ...]], int] = field(compare=False)
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
        found = range(max(self.places) + 1)
        return tuple(tuple(s for s, r in enumerate(self.places) if r == rank) for rank in found)

    @cached_property
    def coming(self) -> tuple[tuple[int, ...], ...]:
        """Once so many stages are made, how many are still to come on each rank."""
        found = range(self.stages + 1)
        return tuple(tuple(sum(s >= made for s in mine) for mine in self.ranks) for made in found)

    @cached_property
    def before(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Forwards and backwards of all parts before each one."""
        return tuple(accumulate(self.forward, initial=0.0)), tuple(accumulate(self.backward, initial=0.0))

    @cached_property
    def both(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(*self.before, strict=True))

    @cached_property
    def long(self) -> float:
        """Runs that take longer make their rank slow, or are too unlike many others."""
        cut = shortest(self)
        if self.stages <= 12:
            return 1.2 * max(self.loads(cut))
        return 1.6 * max(self.both[j] - self.both[i] for i, j in pairwise(cut))

    @cached_property
    def _bytes_before(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(accumulate(self.state, initial=0)), tuple(accumulate(self.saved, initial=0))

    def near_run(self, stage: int, start: int, end: int) -> int:
        """Bytes of a run, without what is no sum over its parts."""
        state, saved = self._bytes_before
        return state[end] - state[start] + self.flying[stage] * (saved[end] - saved[start])

    @cached_property
    def near_rest(self) -> tuple[float, ...]:
        """Bytes of each rank besides its runs, as of a cut that is easily found."""
        cut = shortest(self)
        return tuple(
            float(self.bytes_of(cut, rank) - sum(self.near_run(s, cut[s], cut[s + 1]) for s in mine))
            for rank, mine in enumerate(self.ranks)
        )

    def near_bytes(self, cut: Cut) -> list[float]:
        """Bytes of each rank, about: quicker than ``held``."""
        out = list(self.near_rest)
        for stage, rank in enumerate(self.places):
            out[rank] += self.near_run(stage, cut[stage], cut[stage + 1])
        return out

    def times(self, cut: Cut) -> list[float]:
        """Of each stage, of one micro batch."""
        ends = [self.both[i] for i in cut]
        return [b - a for a, b in pairwise(ends)]

    def loads(self, cut: Cut) -> list[float]:
        """Time of each rank, of one micro batch."""
        times = self.times(cut)
        return [sum([times[s] for s in mine]) for mine in self.ranks]

    def bytes_of(self, cut: Cut, rank: int) -> int:
        return self.held(rank, tuple((s, cut[s], cut[s + 1]) for s in self.ranks[rank]))

    def memory(self, cut: Cut) -> int:
        """Bytes on the fullest rank."""
        return max(self.bytes_of(cut, rank) for rank in range(len(self.ranks)))

    def may_fit(self, room: int) -> bool:
        """No cut fits where not even all parts at their cheapest do, if ranks count by what they would need.

        The weights of ranks are those of the dual of a linear program that cuts parts as it likes.
        """
        few = [min(self.flying[s] for s in mine) for mine in self.ranks]
        weights = [1 / max(1, sum(self.state) + n * sum(self.saved)) for n in few]
        ways = list(zip(few, weights, strict=True))
        least = sum(
            min(weight * (state + n * saved) for n, weight in ways)
            for state, saved in zip(self.state, self.saved, strict=True)
        )
        return least <= room * sum(weights)

    def above_mean(self, cut: Cut) -> float:
        """How much more than the mean the slowest rank has to do: 0.03 is 3 %."""
        loads = self.loads(cut)
        return max(loads) * len(loads) / (sum(loads) or 1.0) - 1


def shortest(row: Row) -> Cut:
    """The cut whose longest run is shortest, by halving the limit that no run may pass."""
    low, high = 0.0, row.both[-1]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(row, middle) else (middle, high)
    found = _filled(row, high * (1 + 1e-9))
    assert found is not None
    return found


def _filled(row: Row, limit: float) -> Cut | None:
    """Each run takes what stays below ``limit``, but leaves every later one a part."""
    cut = [0]
    for stage in range(1, row.stages + 1):
        end, last = cut[-1] + 1, row.parts - row.stages + stage
        while end < last and row.both[end + 1] - row.both[cut[-1]] <= limit:
            end += 1
        if row.both[end] - row.both[cut[-1]] > limit:
            return None
        cut.append(end)
    return tuple(cut) if cut[-1] == row.parts else None
