"""The memory of each pipeline rank over a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from launcher.plan.memory.rank_loads import RankLoad
from launcher.plan.memory.rank_memory import Memory
from launcher.plan.schedule.simulate import Event, Timeline
from launcher.plan.values.grid import Grid


@dataclass(frozen=True)
class MemoryPeriod:
    """A period in which at most ``nbytes`` are in use."""

    start: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class MemoryCurve:
    """The memory of one pipeline rank over a step.

    ``ranks`` are its ranks; the curve is that of ``rank``, the fullest of them. ``spans`` follow one another
    without gaps. ``always``: bytes of weights and optimizer states.
    """

    rank: int
    ranks: tuple[int, ...]
    always: int
    spans: tuple[MemoryPeriod, ...]

    @cached_property
    def fullest(self) -> MemoryPeriod:
        """The first span with the most bytes."""
        return max(self.spans, key=lambda s: s.nbytes)


def curves(
    loads: Sequence[RankLoad],
    memory: Sequence[Memory],
    grid: Grid,
    *,
    timeline: Timeline | None = None,
    after: float = 0.0,
) -> tuple[MemoryCurve, ...]:
    """Returns one curve per pipeline rank; its highest point is the ``Memory.total`` of its rank.

    Time is that of ``timeline``, and each curve ends ``after`` later. Without a timeline each action takes 1,
    and so do the time before the first action and the time after the last.
    """
    out = []
    for pp, load in enumerate(loads):
        ranks = grid.ranks(pp=pp)
        most = max((memory[rank] for rank in ranks), key=lambda m: m.total)
        always = most.params + most.optimizer
        points = _ordered(load, always)
        if timeline is not None:
            events = [e for e in timeline.events if e.rank == pp]
            points = _timed(load, always, events, end=timeline.makespan + after)
        out.append(MemoryCurve(most.rank, ranks, always, tuple(points)))
    return tuple(out)


def _ordered(load: RankLoad, always: int) -> list[MemoryPeriod]:
    return [MemoryPeriod(i, i + 1, always + level.most.total) for i, level in enumerate(load.levels)]


def _timed(load: RankLoad, always: int, events: Sequence[Event], *, end: float) -> list[MemoryPeriod]:
    """Returns spans in the time of ``events``.

    Between two actions a rank uses the bytes that the first one left. The last span shows the most bytes in
    use after the last action.
    """
    first, *during, last = load.levels
    out = [MemoryPeriod(0.0, events[0].start if events else 0.0, always + first.most.total)]
    for e, later, level in zip(events, [*events[1:], None], during, strict=True):
        out.append(MemoryPeriod(e.start, e.end, always + level.most.total))
        if later is not None and later.start > e.end:
            out.append(MemoryPeriod(e.end, later.start, always + level.after.total))
    return [*out, MemoryPeriod(out[-1].end, end, always + last.most.total)]
