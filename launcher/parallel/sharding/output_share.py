"""The part of an output over device matrices that this rank has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from launcher.parallel.output_share import OutputShare
from launcher.parallel.sharding.process_groups import StageGroups
from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.sharding.redistribution.direct_exchange import rows_over
from launcher.plan.sharding.stage_sharding import Sharding
from launcher.plan.sharding.tensor_layout import TensorLayout


@dataclass(frozen=True)
class MatrixShare(OutputShare):
    """A rank's part of an output with ``layout``, in which this rank is number ``rank`` of its stage."""

    layout: TensorLayout
    rank: int

    def targets(self, whole: Tensor) -> Tensor:
        """Return the targets of this rank's part of the output: a micro batch's, split as its samples are."""
        for dim, axes in enumerate(self.layout.dims[:-1]):
            if axes and dim < whole.dim():
                size = whole.shape[dim] // self.layout.slices[dim]
                whole = whole.narrow(dim, self.layout.part(axes, self.rank) * size, size)
        return whole


def matrix_share(sharding: Sharding, rank: int, groups: StageGroups | None) -> MatrixShare:
    """Return the share of the output in training; ``rank`` is the number in the last stage.

    The output is repeated over some axes of the matrix, and its classes are split over others.
    """
    train = sharding.stages[-1].train
    layout = train.taken[train.returns[0]].layout
    last = layout.dims[-1] if layout.dims else ()
    at = layout.coords(rank)
    counts = not any(at[a] for a in (*layout.repeated, *last))
    if groups is None or not last or layout.slices[-1] == 1:
        return MatrixShare(None, counts, layout, rank)
    group, _ = groups.of(rows_over(layout.matrix, tuple(sorted(last))))
    return MatrixShare(Axis(layout.slices[-1], layout.part(last, rank), group), counts, layout, rank)
