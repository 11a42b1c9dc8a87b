"""The parts of the model's output, and of the loss, that this rank has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.plan import Plan


@dataclass(frozen=True)
class OutputShare:
    """A rank's part of the model's output and loss.

    ``classes`` has the ranks over which its last dim is split. ``counts`` says whether this rank's loss
    counts: of ranks that compute the same loss, only the first one's does.
    """

    classes: Axis | None
    counts: bool

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The additional arguments of the loss of a split output."""
        return () if self.classes is None else (self.classes,)

    def targets(self, full: Tensor) -> Tensor:
        """Return the targets of this rank's part of the output: a micro batch's, split as its samples are."""
        return full


def output_share(plan: Plan, axis: Axis, rank: int) -> OutputShare:
    """Return the share of the output in training; ``rank`` is the number on ``axis``, that of ``tp``."""
    cut = plan.operators.output is not None
    return OutputShare(axis if cut else None, counts=rank == 0)  # the ranks of tp compute the same loss
