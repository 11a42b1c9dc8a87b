"""The actions of a pipeline rank, which it does one after the other."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """A forward, full backward, input gradient or weight gradient of one micro batch on one virtual stage.

    It prints as torch writes it: ``3F0`` is stage 3, forward, micro batch 0.
    """

    stage: int
    kind: Kind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


Row = tuple[Action, ...]
Schedule = tuple[Row, ...]
"""One row a pipeline rank."""
