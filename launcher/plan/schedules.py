"""Pipeline schedules as data: the order of actions of every pipeline rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from launcher.plan import orders, split_orders
from launcher.plan.actions import Schedule

Order = Callable[[int, int, int], Schedule]
"""(ranks, chunks, micros) -> schedule."""


@dataclass(frozen=True)
class Rule:
    """A scheduler: its order, and what it asks of the rest.

    ``v``: exactly two virtual stages a rank, placed there and back. ``single``: one stage a rank. ``split``: backwards
    are cut into input and weight gradients. ``full``: at least as many micro batches as virtual stages.
    """

    order: Order
    v: bool = False
    single: bool = False
    split: bool = False
    full: bool = False


RULES: Final[Mapping[str, Rule]] = {
    "gpipe": Rule(orders.breadth_first),
    "1f1b": Rule(orders.depth_first),
    "zero_bubble_h1": Rule(split_orders.zero_bubble_h1, single=True, split=True),
    "zero_bubble_v": Rule(split_orders.zero_bubble_v, v=True, split=True),
    "dualpipe_v": Rule(split_orders.dualpipe_v, v=True, split=True, full=True),
}
AVAILABLE: Final = tuple(RULES)


def refusal(scheduler: str) -> str | None:
    """Why ``scheduler`` cannot run today, or ``None``; ``auto`` is for ``choose`` to replace by one that can."""
    if scheduler in RULES or scheduler == "auto":
        return None
    return f"{scheduler} is not available yet; today there are {', '.join(AVAILABLE)}"


def placement(ranks: int, chunks: int, v: bool = False) -> tuple[int, ...]:
    """The rank of each virtual stage: round after round, or there and back.

    >>> placement(2, 2), placement(2, 2, v=True)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    return tuple(ranks - 1 - s % ranks if v and s // ranks % 2 else s % ranks for s in range(ranks * chunks))


def build(scheduler: str, ranks: int, chunks: int, micros: int, less_memory: bool = False) -> Schedule:
    """The order of an available ``scheduler`` on ``ranks`` x ``chunks`` virtual stages, placed as its rule says.

    On one rank there is nothing to fill: one micro batch after the other, or all forwards first for gpipe.
    ``less_memory`` is for interleaved 1f1b.
    """
    if less_memory:
        return orders.less_memory(ranks, chunks, micros)
    known = RULES[scheduler] if ranks > 1 else RULES["gpipe" if scheduler == "gpipe" else "1f1b"]
    return known.order(ranks, chunks, micros)


def forward_only(places: tuple[int, ...], micros: int) -> Schedule:
    """For evaluation: every forward once, no backward."""
    return orders.forwards(places, micros)


def validate(schedule: Schedule, place: tuple[int, ...], micros: int) -> list[str]:
    """Actions missing, repeated, unknown or on the wrong rank; empty when there are none.

    Each stage does each micro batch forward once, and backward once: B, or I and W. Order is for ``simulate`` to judge.
    """
    found = []
    done: dict[tuple[int, int], str] = defaultdict(str)
    for rank, row in enumerate(schedule):
        for a in row:
            done[a.stage, a.micro] += a.kind
            if not 0 <= a.stage < len(place):
                found.append(f"{a} on rank {rank}: no stage {a.stage} among {len(place)}")
            elif not 0 <= a.micro < micros:
                found.append(f"{a} on rank {rank}: no micro batch {a.micro} among {micros}")
            elif place[a.stage] != rank:
                found.append(f"{a} is on rank {rank}, its stage on rank {place[a.stage]}")
    for stage in range(len(place)):
        for micro in range(micros):
            kinds = "".join(sorted(done[stage, micro]))
            if kinds not in ("BF", "FIW"):
                does = ", ".join(kinds) or "nothing"
                found.append(f"stage {stage}, micro batch {micro}: does {does}; needs F and B, or F, I and W")
    return found
