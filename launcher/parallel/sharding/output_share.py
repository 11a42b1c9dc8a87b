"""Which part of the model's output this rank has, and of the loss."""

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
    """``classes``: the ranks over which its last dim is cut. ``counts``: whether this rank's loss counts.

    Of ranks that work out the same loss the first one's does. ``layout``: of the output over device matrices,
    where this rank is number ``rank`` of its stage.
    """

    classes: Axis | None
    counts: bool
    layout: TensorLayout | None = None
    rank: int = 0

    @property
    def parts(self) -> tuple[Axis, ...]:
        """What the loss of a cut output takes besides."""
        return () if self.classes is None else (self.classes,)

    def targets(self, whole: Tensor) -> Tensor:
        """Those of this rank's part of the output: the targets of a micro batch, cut as its samples are."""
        if self.layout is None:
            return whole
        for dim, axes in enumerate(self.layout.dims[:-1]):
            if axes and dim < whole.dim():
                size = whole.shape[dim] // self.layout.slices[dim]
                whole = whole.narrow(dim, self.layout.part(axes, self.rank) * size, size)
        return whole


def output_share(plan: Plan, axis: Axis, rank: int, groups: StageGroups | None) -> OutputShare:
    """Of the output in training. ``rank``: of the last stage; ``axis``: that of operators over ``tp``."""
    if plan.sharding is None:
        cut = plan.operators.output is not None
        return OutputShare(axis if cut else None, counts=rank == 0)  # the ranks of tp work out the same loss

    # over device matrices: repeated over some axes, the classes cut over others
    train = plan.sharding.stages[-1].train
    layout = train.taken[train.returns[0]].layout
    last = layout.dims[-1] if layout.dims else ()
    at = layout.coords(rank)
    counts = not any(at[a] for a in (*layout.repeated, *last))
    if groups is None or not last or layout.slices[-1] == 1:
        return OutputShare(None, counts, layout, rank)
    group, _ = groups.of(rows_over(layout.matrix, tuple(sorted(last))))
    return OutputShare(Axis(layout.slices[-1], layout.part(last, rank), group), counts, layout, rank)
