"""The process groups of collectives among the ranks of a stage, and sums over axes of a device matrix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.distributed as dist

from launcher.plan.sharding.redistribution.direct_exchange import Rows, rows_over
from launcher.plan.sharding.redistribution.planned import Redistribution

REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def rows_of(plans: Iterable[Redistribution]) -> tuple[Rows, ...]:
    """Return the distinct rows of stage ranks that the plans' collectives need."""
    return tuple(dict.fromkeys(step.rows for plan in plans for step in plan.steps if step.op != "slice"))


@dataclass(frozen=True)
class StageGroups:
    """A rank's process groups in its stage.

    ``rank`` is its place in the stage. ``groups`` has, for rows of ranks, the group of this rank's row, and
    the row.
    """

    rank: int
    groups: dict[Rows, tuple[dist.ProcessGroup, tuple[int, ...]]]

    @classmethod
    def build(
        cls,
        stages: Sequence[tuple[int, ...]],
        needs: Sequence[Iterable[Rows]],
        whole: dist.ProcessGroup | None = None,
    ) -> StageGroups:
        """Make all groups.

        Every rank calls this with the same arguments, as all ranks make each group in one order.

        Args:
            stages: the ranks of each stage, ascending and disjoint.
            needs: the rows of ranks for which each stage needs groups.
            whole: the group of this rank's stage, if it exists: on every rank or on none.
        """
        rank = dist.get_rank()
        own = next(stage for stage in stages if rank in stage)
        place = own.index(rank)
        groups: dict[Rows, tuple[dist.ProcessGroup, tuple[int, ...]]] = {}
        for stage, need in zip(stages, needs, strict=True):
            need = [rows for rows in dict.fromkeys(need) if len(rows[0]) > 1]
            made = {
                row: _group(stage, row, whole) for row in dict.fromkeys(row for rows in need for row in rows)
            }
            if stage == own:
                mine = {rows: next(row for row in rows if place in row) for rows in need}
                groups = {rows: (made[row], row) for rows, row in mine.items()}
        return cls(place, groups)

    def of(self, rows: Rows) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
        """Return the group of this rank's row, and the row in the order of the group."""
        return self.groups[rows]

    def all_reduce(
        self,
        x: torch.Tensor,
        matrix: tuple[int, ...],
        axes: tuple[int, ...],
        op: Literal["sum", "max"] = "sum",
    ) -> torch.Tensor:
        """Reduce ``x`` (contiguous) in place over axes of a device matrix; meta tensors are not sent."""
        if not x.is_meta and prod(matrix[a] for a in axes) > 1:
            dist.all_reduce(x, REDUCE[op], group=self.of(rows_over(matrix, axes))[0])
        return x


def _group(
    stage: tuple[int, ...], row: tuple[int, ...], whole: dist.ProcessGroup | None
) -> dist.ProcessGroup:  # fmt: skip
    if len(row) == dist.get_world_size():
        whole = dist.group.WORLD
    if len(row) == len(stage) and whole is not None:
        return whole
    group: dist.ProcessGroup = dist.new_group([stage[r] for r in row])  # making one costs 10 ms
    return group
