"""What a training makes smaller, as far as a plan has to know it."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.values.facts import IGNORED


@dataclass(frozen=True)
class Objective:
    """``loss``: its name, or ``_target_``; ``ignored``: a class number that counts for nothing.

    ``metrics``: what each is called in the figures of a step; ``ranked``: those of them that have a name,
    all of class numbers, and the k of a top-k, else 0. ``whole``: the loss or a metric is the user's own,
    which only takes a whole output.
    """

    loss: str = "cross_entropy"
    ignored: int = IGNORED
    metrics: tuple[str, ...] = ()
    ranked: tuple[tuple[str, int], ...] = ()
    whole: bool = False

    @property
    def classes(self) -> bool:
        """Whether targets are class numbers."""
        return self.loss == "cross_entropy"
