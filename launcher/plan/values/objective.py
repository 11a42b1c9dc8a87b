"""The objective of a training, as far as a plan depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.values.facts import IGNORED


@dataclass(frozen=True)
class Objective:
    """The loss and the metrics of a training.

    ``loss``: its name, or ``_target_`` for a user's class. ``ignored``: the class number that the loss
    ignores. ``metrics``: the name of each among the figures of a step. ``ranked``: the built-in metrics, each
    with the k of a top-k, otherwise 0. ``whole``: the loss or a metric is a user's class, which needs the
    full output.
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
