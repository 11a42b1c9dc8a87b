"""What is on the network beside the actions of each pipeline rank: stretches of time to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.plan.schedule.simulate import Timeline
from launcher.plan.values.text import bytes_text, seconds_text


@dataclass(frozen=True)
class Part:
    """All collectives of one ``kind``: how many, and what their bytes and seconds come to."""

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
    """From ``start`` to ``end`` of a timeline; ``parts``: what it is made of, if there is more to say."""

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
    """``label``: what it shows. Stretches lie rank after rank, those of a rank by their start."""

    name: Literal["messages", "tp", "data-parallel"]
    label: str
    stretches: tuple[Stretch, ...]


def messages(timeline: Timeline) -> Lane:
    """Between stages, each of the rank that sends it; nothing where they take no time."""
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
