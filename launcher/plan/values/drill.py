"""A fault that a run rehearses: what happens on which ranks, in which step."""

from __future__ import annotations

from dataclasses import dataclass

WRITING = ("torn_write", "disk_full")
"""Happen while the checkpoint of their step is written."""


@dataclass(frozen=True)
class Fault:
    """``step`` counts from 1; ``ms``: of ``slow_rank``, that each of ``ranks`` sleeps in every step.

    ``restarts``: somebody has to start the ranks again.
    """

    kind: str
    ranks: tuple[int, ...]
    step: int
    ms: float = 0.0
    restarts: bool = True

    @property
    def done(self) -> int:
        """Optimizer steps that the weights have seen when it happens."""
        return self.step if self.kind in WRITING else self.step - 1

    def __str__(self) -> str:
        which = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        pace = f", {self.ms:g} ms a step" if self.ms else ""
        return f"{self.kind} of {which} in step {self.step}{pace}"
