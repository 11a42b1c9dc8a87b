"""This rank's share of the model's output and of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.plan import Plan


@dataclass(frozen=True)
class OutputShare:
    """A rank's part of the model's output and loss.

    ``classes`` has the ranks over which the output's last dim is split. ``counts`` tells whether this rank's
    loss counts: if several ranks compute the same loss, only that of the first one counts.
    """

    classes: Axis | None
    counts: bool

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The additional arguments of the loss of a split output."""
        return () if self.classes is None else (self.classes,)

    def targets(self, full: Tensor) -> Tensor:
        """Returns the targets of this rank's part of the output, taken from a micro batch's targets."""
        return full


def output_share(plan: Plan, axis: Axis, rank: int) -> OutputShare:
    """Returns the share of the output in training; ``rank`` is the number on ``axis``, the axis ``tp``."""
    cut = plan.operators.output is not None
    return OutputShare(axis if cut else None, counts=rank == 0)  # the ranks of tp compute the same loss
