"""Pipeline schedules as data: the order of actions of every pipeline rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

from launcher.plan import orders
from launcher.plan.actions import Schedule

Order = Callable[[int, int, int], Schedule]
"""(ranks, chunks, micros) -> schedule."""

ORDERS: Final[Mapping[str, Order]] = {"gpipe": orders.breadth_first, "1f1b": orders.depth_first}
AVAILABLE: Final = tuple(ORDERS)


def refusal(scheduler: str) -> str | None:
    """Why ``scheduler`` cannot run today, or ``None``."""
    if scheduler in ORDERS:
        return None
    return (
        f"{scheduler} is not available yet; today there are {', '.join(AVAILABLE)}, each with interleave=true or false"
    )


def placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each virtual stage: stage s lies on rank s % ranks.

    >>> placement(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(s % ranks for s in range(ranks * chunks))


def build(scheduler: str, ranks: int, chunks: int, micros: int) -> Schedule:
    """The order of an available ``scheduler``; ``chunks`` (virtual stages a rank) above 1 is its interleaved form."""
    return ORDERS[scheduler](ranks, chunks, micros)


def forward_only(ranks: int, chunks: int, micros: int) -> Schedule:
    """For evaluation: every forward once, no backward."""
    return orders.forwards(ranks, chunks, micros)


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
