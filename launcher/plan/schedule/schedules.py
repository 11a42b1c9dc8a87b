"""Pipeline schedules as data: the order of actions of every pipeline rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from launcher.plan.schedule import orders, sequence_orders, split_orders
from launcher.plan.schedule.actions import Action, Schedule

Order = Callable[..., Schedule]
"""(ranks, chunks, micros) -> schedule, or (ranks, chunks, micros, pieces) if sequences are cut."""


@dataclass(frozen=True)
class Rule:
    """A scheduler: its order, and what it requires.

    ``v``: exactly two virtual stages a rank, placed there and back. ``single``: one stage a rank.
    ``split``: it splits backwards into input and weight gradients. ``full``: at least as many micro batches
    as virtual stages. ``seq``: it takes pieces of sequences. ``several``: at least two virtual stages a rank,
    and no more pieces than ranks.
    """

    order: Order
    v: bool = False
    single: bool = False
    split: bool = False
    full: bool = False
    seq: bool = False
    several: bool = False


RULES: Final[Mapping[str, Rule]] = {
    "gpipe": Rule(orders.breadth_first),
    "1f1b": Rule(orders.depth_first),
    "zero_bubble_h1": Rule(split_orders.zero_bubble_h1, single=True, split=True),
    "zero_bubble_v": Rule(split_orders.zero_bubble_v, v=True, split=True),
    "dualpipe_v": Rule(split_orders.dualpipe_v, v=True, split=True, full=True),
    "seqpipe": Rule(sequence_orders.seqpipe, seq=True),
    "seqvpp": Rule(sequence_orders.seqvpp, seq=True, several=True),
    "seqsmartvpp": Rule(sequence_orders.seqsmartvpp, seq=True, several=True),
}


def placement(ranks: int, chunks: int, v: bool = False) -> tuple[int, ...]:
    """Returns the rank of each virtual stage: round after round, or there and back.

    >>> placement(2, 2), placement(2, 2, v=True)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return tuple(rank for chunk in range(chunks) for rank in (back if v and chunk % 2 else there))


def build(
    scheduler: str, ranks: int, chunks: int, micros: int, less_memory: bool = False, pieces: int = 1
) -> Schedule:
    """Returns the order of ``scheduler`` on ``ranks`` x ``chunks`` virtual stages, placed as its rule says.

    One rank has no bubble to fill: it runs one micro batch after the other, or for gpipe all forwards first.
    ``less_memory`` is for interleaved 1f1b. With ``pieces``, the micro number of an action is
    micro batch x pieces + piece.
    """
    if less_memory:
        return orders.less_memory(ranks, chunks, micros)
    if ranks == 1 and scheduler != "gpipe":
        scheduler = "1f1b"
    known = RULES[scheduler]
    return known.order(ranks, chunks, micros, pieces) if known.seq else known.order(ranks, chunks, micros)


def forward_only(places: tuple[int, ...], micros: int) -> Schedule:
    """Returns the schedule of an evaluation: every forward once, no backward."""
    return orders.forwards(places, micros)


def validate(schedule: Schedule, place: tuple[int, ...], micros: int, pieces: int = 1) -> list[str]:
    """Returns the actions that are missing, repeated, unknown or on the wrong rank; empty if there are none.

    Each stage must run each micro batch forward once and backward once: B, or I and W. ``simulate`` checks
    the order, except that of the pieces of one micro batch, which is checked here: forward in order, backward
    in reverse. ``micros`` counts pieces.
    """
    found = []
    done: dict[tuple[int, int], str] = defaultdict(str)

    # each action on the rank of its stage
    for rank, row in enumerate(schedule):
        for a in row:
            done[a.stage, a.micro] += a.kind
            if not 0 <= a.stage < len(place):
                found.append(f"{a} on rank {rank}: no stage {a.stage} among {len(place)}")
            elif not 0 <= a.micro < micros:
                found.append(f"{a} on rank {rank}: no micro batch {a.micro} among {micros}")
            elif place[a.stage] != rank:
                found.append(f"{a} is on rank {rank}, its stage on rank {place[a.stage]}")

    # nothing missing, nothing twice
    for stage in range(len(place)):
        for micro in range(micros):
            kinds = "".join(sorted(done[stage, micro]))
            if kinds not in ("BF", "FIW"):
                does = ", ".join(kinds) or "nothing"
                found.append(f"stage {stage}, micro batch {micro}: does {does}; needs F and B, or F, I and W")
    return found + _disorder(schedule, pieces)


def _disorder(schedule: Schedule, pieces: int) -> list[str]:
    last: dict[tuple[int, str, int], int] = {}
    found = []
    for row in schedule:
        for a in row:
            before = last.get((a.stage, a.kind, a.micro // pieces), a.micro)
            if a.micro < before if a.kind == "F" else a.micro > before:
                found.append(f"{a} comes after {Action(a.stage, a.kind, before)}, of the same micro batch")
            last[a.stage, a.kind, a.micro // pieces] = a.micro
    return found
