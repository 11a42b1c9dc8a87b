"""The order of the actions of each pipeline rank: one function a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

from launcher.plan.schedule.actions import Action, Row, Schedule

Groups = Sequence[range]
"""Groups of micro batches; each group passes one chunk after the other."""


def breadth_first(ranks: int, chunks: int, micros: int) -> Schedule:
    """GPipe: all forwards, then all backwards; with chunks Looped BFS (arXiv 2211.05953), chunk by chunk."""
    everything = [range(micros)]
    return tuple(_row(r, ranks, chunks, everything, warm=chunks * micros) for r in range(ranks))


def depth_first(ranks: int, chunks: int, micros: int) -> Schedule:
    """1F1B. With chunks it is interleaved (arXiv 2104.04473): groups of micro batches pass chunk after chunk.

    A rank is ahead of the next one by one forward, with chunks by two: the second hides the transfer.
    """
    return _in_groups(ranks, chunks, micros, 1 if chunks == 1 else 2)


def less_memory(ranks: int, chunks: int, micros: int) -> Schedule:
    """MindSpore's less-memory interleaved 1F1B: each rank is ahead of the next one by one forward.

    The step is as short as that of ``depth_first`` only if transfers take no time.
    """
    return _in_groups(ranks, chunks, micros, 1)


def _in_groups(ranks: int, chunks: int, micros: int, lead: int) -> Schedule:
    groups = grouped(ranks, micros)
    first = (chunks - 1) * len(groups[0])
    return tuple(_row(r, ranks, chunks, groups, warm=lead * (ranks - 1 - r) + first) for r in range(ranks))


def forwards(places: tuple[int, ...], micros: int) -> Schedule:
    """Forwards only: groups of micro batches pass the stages of a rank in turn, on any placement."""
    ranks = max(places) + 1
    held = [[s for s, rank in enumerate(places) if rank == r] for r in range(ranks)]
    groups = grouped(ranks, micros)
    return tuple(tuple(Action(s, "F", m) for group in groups for s in mine for m in group) for mine in held)


def grouped(ranks: int, micros: int) -> Groups:
    """Returns groups of ``ranks`` micro batches; the first also takes the remainder, as in MindSpore.

    >>> grouped(4, 10)
    [range(0, 6), range(6, 10)]
    """
    first = min(micros, ranks + micros % ranks)
    return [range(first), *(range(m, m + ranks) for m in range(first, micros, ranks))]


def _row(rank: int, ranks: int, chunks: int, groups: Groups, *, warm: int) -> Row:
    """Returns ``warm`` forwards, then one forward and one backward in turn, then the remaining backwards.

    Backwards take groups in the order of their forwards, and within a group the last chunk first.
    """
    ahead = _across(rank, ranks, range(chunks), groups, kind="F")
    back = _across(rank, ranks, range(chunks)[::-1], groups, kind="B")
    turns = list(chain.from_iterable(zip(ahead[warm:], back, strict=False)))
    return (*ahead[:warm], *turns, *back[len(turns) // 2 :])


def _across(rank: int, ranks: int, chunks: range, groups: Groups, *, kind: Literal["F", "B"]) -> Row:
    return tuple(Action(c * ranks + rank, kind, m) for group in groups for c in chunks for m in group)
