"""A fault that a run injects on purpose: its kind, its ranks and its step."""

from __future__ import annotations

from dataclasses import dataclass

WRITING = ("torn_write", "disk_full")
"""Kinds of faults that happen while the checkpoint of their step is written."""


@dataclass(frozen=True)
class Fault:
    """A fault of ``kind`` on ``ranks`` in ``step``, which counts from 1.

    ``ms``: for ``slow_rank``, the milliseconds that each of ``ranks`` sleeps in every step. ``restarts``: the
    ranks have to be started again afterwards.
    """

    kind: str
    ranks: tuple[int, ...]
    step: int
    ms: float = 0.0
    restarts: bool = True

    @property
    def done(self) -> int:
        """The number of optimizer steps that are complete when the fault happens."""
        return self.step if self.kind in WRITING else self.step - 1

    def __str__(self) -> str:
        which = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        pace = f", {self.ms:g} ms a step" if self.ms else ""
        return f"{self.kind} of {which} in step {self.step}{pace}"
