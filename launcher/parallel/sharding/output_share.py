"""Which part of the model's output this rank has, and of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from launcher.parallel.tensor_parallel.collectives import Axis
from launcher.plan.sharding.redistribution.direct_exchange import rows_over
from launcher.plan.sharding.tensor_layout import TensorLayout

if TYPE_CHECKING:
    from launcher.parallel.parallel_model import ParallelModel


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


def output_share(model: ParallelModel) -> OutputShare:
    """Of the output in training."""
    plan = model.plan
    if plan.sharding is None:
        first = model.meshes.coords["tp"] == 0  # the ranks of tp work out the same loss
        return OutputShare(model.axis if plan.operators.output is not None else None, first)

    if all(part.stage.index < len(plan.stages) - 1 for part in model.parts):
        return OutputShare(None, counts=False)

    # over device matrices: repeated over some axes, the classes cut over others
    train = plan.sharding.stages[-1].train
    layout = train.taken[train.returns[0]].layout
    rank = model.meshes.coords["tp"]
    at = layout.coords(rank)
    last = layout.dims[-1] if layout.dims else ()
    counts = not any(at[a] for a in (*layout.repeated, *last))
    return OutputShare(_classes(model, layout, last, rank), counts, layout, rank)


def _classes(model: ParallelModel, layout: TensorLayout, last: tuple[int, ...], rank: int) -> Axis | None:
    if not last or not model.weights:
        return None
    groups = model.weights[0].groups
    group, _ = groups.of(rows_over(layout.matrix, tuple(sorted(last))))
    return Axis(layout.slices[-1], layout.part(last, rank), group)
