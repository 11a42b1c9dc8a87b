"""Notes of a plan, which its reader should know besides the settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A default that was resolved, or anything else that the reader of a plan should know."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key} {self.text}"

    @property
    def default(self) -> bool:
        """True if the note says how the plan resolved a default.

        >>> Note("parallel.hsdp.shard_size", "-1 -> 4: the data-parallel group").default
        True
        """
        return self.text.startswith(("null -> ", "auto -> ", "-1 -> "))
