"""The parts of the model's output, and of the loss, that this rank has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from launcher.parallel.sharding.process_groups import StageGroups
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.plan import Plan
from launcher.plan.sharding.redistribution.direct_exchange import rows_over
from launcher.plan.sharding.tensor_layout import TensorLayout


@dataclass(frozen=True)
class OutputShare:
    """A rank's part of the model's output and loss.

    ``classes`` has the ranks over which its last dim is split. ``counts`` says whether this rank's loss
    counts: of ranks that compute the same loss, only the first one's does. ``layout`` is that of an output
    over device matrices, in which this rank is number ``rank`` of its stage.
    """

    classes: Axis | None
    counts: bool
    layout: TensorLayout | None = None
    rank: int = 0

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The additional arguments of the loss of a split output."""
        return () if self.classes is None else (self.classes,)

    def targets(self, whole: Tensor) -> Tensor:
        """Return the targets of this rank's part of the output: a micro batch's, split as its samples are."""
        if self.layout is None:
            return whole
        for dim, axes in enumerate(self.layout.dims[:-1]):
            if axes and dim < whole.dim():
                size = whole.shape[dim] // self.layout.slices[dim]
                whole = whole.narrow(dim, self.layout.part(axes, self.rank) * size, size)
        return whole


def output_share(plan: Plan, axis: Axis, rank: int, groups: StageGroups | None) -> OutputShare:
    """Return the share of the output in training.

    ``rank`` is the number in the last stage, or on ``axis``, that of operators over ``tp``.
    """
    if plan.sharding is None:
        cut = plan.operators.output is not None
        return OutputShare(axis if cut else None, counts=rank == 0)  # the ranks of tp compute the same loss

    # over device matrices: repeated over some axes, the classes split over others
    train = plan.sharding.stages[-1].train
    layout = train.taken[train.returns[0]].layout
    last = layout.dims[-1] if layout.dims else ()
    at = layout.coords(rank)
    counts = not any(at[a] for a in (*layout.repeated, *last))
    if groups is None or not last or layout.slices[-1] == 1:
        return OutputShare(None, counts, layout, rank)
    group, _ = groups.of(rows_over(layout.matrix, tuple(sorted(last))))
    return OutputShare(Axis(layout.slices[-1], layout.part(last, rank), group), counts, layout, rank)
