"""Whether the memory that a rank needs fits on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan.cost.memory import Memory
from launcher.plan.values.text import bytes_text, spans

KEY = "cluster.memory_gb"


@dataclass(frozen=True)
class Room:
    """The memory of the fullest ``ranks``: each needs ``needed`` bytes of ``room``."""

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
    """Returns the room on the ranks that need most memory."""
    most = max(m.total for m in memory)
    return Room(most, room, tuple(m.rank for m in memory if m.total == most))
