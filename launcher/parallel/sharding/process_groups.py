"""The process groups of collectives among the ranks of a stage, and sums over axes of a device matrix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from launcher.plan.sharding.direct_exchange import Rows, rows_over
from launcher.plan.sharding.redistribution import Redistribution

REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def rows_of(plans: Iterable[Redistribution]) -> tuple[Rows, ...]:
    """The ranks of a stage that their collectives are among, each once."""
    return tuple(dict.fromkeys(step.rows for plan in plans for step in plan.steps if step.op != "slice"))


@dataclass(frozen=True)
class StageGroups:
    """``rank``: this rank's place in its stage. ``groups``: by ranks of the stage, those that it is in."""

    rank: int
    groups: dict[tuple[int, ...], dist.ProcessGroup]

    @classmethod
    def build(
        cls,
        stages: Sequence[tuple[int, ...]],
        needs: Sequence[Iterable[Rows]],
        whole: dist.ProcessGroup | None = None,
    ) -> StageGroups:
        """Every rank calls this with the same arguments: groups are made by all, in one order, none twice.

        ``stages``: the ranks of each in rising order, none in two; ``needs``: the rows that each has groups
        for. ``whole``: this rank's stage, where its group is there already: on every rank or on none.
        """
        rank = dist.get_rank()
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        own = next(stage for stage in stages if rank in stage)
        for stage, rows in zip(stages, needs, strict=True):
            for row in dict.fromkeys(row for some in rows for row in some):
                if len(row) == len(stage) == dist.get_world_size():
                    group = dist.group.WORLD
                elif len(row) == len(stage) and whole is not None:
                    group = whole
                else:
                    group = dist.new_group([stage[r] for r in row])  # making one costs 10 ms
                if stage == own and own.index(rank) in row:
                    assert group is not None
                    made[row] = group
        return cls(own.index(rank), made)

    def of(self, rows: Rows) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
        """The group of the row that this rank is in, and that row, in the order of the group."""
        row = next(row for row in rows if self.rank in row)
        return self.groups[row], row

    def all_reduce(
        self,
        x: torch.Tensor,
        matrix: tuple[int, ...],
        axes: tuple[int, ...],
        op: Literal["sum", "max"] = "sum",
    ) -> torch.Tensor:
        """In place, over axes of a device matrix; ``x`` is contiguous."""
        if axes:
            dist.all_reduce(x, REDUCE[op], group=self.of(rows_over(matrix, axes))[0])
        return x
