"""The traffic of ranks in a timeline: which collectives and messages run when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.plan.schedule.simulate import Timeline
from launcher.plan.values.text import bytes_text, seconds_text


@dataclass(frozen=True)
class Part:
    """All collectives of one ``kind``: their number, and the sums of their bytes and seconds."""

    kind: str
    count: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        """
        >>> str(Part("all_gather", 2, 3 * 1024**3, 0.5))
        '2 x all_gather, 3.0 GB, 500.0 ms'
        """
        return f"{self.count} x {self.kind}, {bytes_text(self.nbytes)}, {seconds_text(self.seconds)}"


@dataclass(frozen=True)
class Stretch:
    """Traffic of a rank from ``start`` to ``end`` of a timeline; ``parts``: its collectives, if known."""

    rank: int
    start: float
    end: float
    name: str
    parts: tuple[Part, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Lane:
    """A row of the picture; ``label`` says what it shows. Stretches are sorted by rank, then by start."""

    name: Literal["messages", "tp", "data-parallel"]
    label: str
    stretches: tuple[Stretch, ...]


def messages(timeline: Timeline) -> Lane:
    """Returns the messages between stages, each on the rank that sends it; none if they take no time."""
    sent = timeline.sent if timeline.transfer else ()
    steps = {"F": 1, "B": -1, "I": -1}
    return Lane(
        "messages",
        "messages between stages",
        tuple(
            Stretch(e.rank, e.start, e.end, f"{e.action} to stage {e.action.stage + steps[e.action.kind]}")
            for e in sent
        ),
    )
