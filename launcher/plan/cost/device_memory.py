"""Whether what a rank needs has room on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan.cost.memory import Memory
from launcher.plan.values.text import bytes_text, spans

KEY = "cluster.memory_gb"


@dataclass(frozen=True)
class Room:
    """``needed`` of ``room`` bytes on each of the ``ranks`` that need most."""

    needed: int
    room: int
    ranks: tuple[int, ...]

    @property
    def told(self) -> str:
        """
        >>> print(Room(5 << 30, 4 << 30, (3,)).told)
        4: does not fit: rank 3 needs 5.0 GB of 4.0 GB
        """
        return f"{self.room / (1 << 30):g}: {self}"

    @property
    def fits(self) -> bool:
        return self.needed <= self.room

    def __str__(self) -> str:
        """
        >>> print(Room(3 << 30, 4 << 30, (0, 1)))
        fits: 3.0 of 4.0 GB on ranks 0-1
        >>> print(Room(5 << 30, 4 << 30, (3,)))
        does not fit: rank 3 needs 5.0 GB of 4.0 GB
        """
        needed, room = bytes_text(self.needed), bytes_text(self.room)
        alone = len(self.ranks) == 1
        who = f"rank{'' if alone else 's'} {spans(self.ranks)}"
        if not self.fits:
            need = "needs" if alone else "need"
            return f"does not fit: {who} {need} {needed} of {room}"
        if needed.split()[1] == room.split()[1]:
            needed = needed.split()[0]
        return f"fits: {needed} of {room} on {who}"


def tightest(memory: Sequence[Memory], room: int) -> Room:
    """Where it is tightest."""
    most = max(m.total for m in memory)
    return Room(most, room, tuple(m.rank for m in memory if m.total == most))
