"""One step of a redistribution: a collective, or a slice that every rank cuts from its own part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from launcher.plan.sharding.redistribution.direct_exchange import (
    Exchange,
    Rows,
    exchange,
    received,
    rows_over,
)
from launcher.plan.sharding.tensor_layout import TensorLayout

Op = Literal["slice", "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "exchange"]


@dataclass(frozen=True)
class Collective:
    """The collective that one rank calls among ``ranks`` ranks.

    ``elements``: as torch counts them: the output of a gather, the input of a scatter; for an exchange, the
    larger of the elements sent and received.
    """

    op: str
    elements: int
    ranks: int


@dataclass(frozen=True)
class Step:
    """A step from layout ``before`` to layout ``after`` of a tensor of ``shape``.

    Both layouts have the same matrix, except for "exchange" and "slice". The ranks of a collective differ
    over ``axes``, outermost first. "all_gather" joins the innermost cuts of ``dim``, which are those of
    ``axes``. "all_to_all" does the same, and then ``to_axes``, the same axes in another order, cut
    ``to_dim``. "reduce_scatter" sums over ``axes``, which then cut ``dim``.
    """

    op: Op
    before: TensorLayout
    after: TensorLayout
    shape: tuple[int, ...]
    dim: int = -1
    axes: tuple[int, ...] = ()
    to_dim: int = -1
    to_axes: tuple[int, ...] = ()

    @cached_property
    def exchange(self) -> Exchange:
        """For an "exchange": who sends what to whom."""
        return exchange(self.before, self.after, self.shape)

    @cached_property
    def rows(self) -> Rows:
        """The groups of ranks of the collective; none for a slice."""
        if self.op == "slice":
            return ()
        return self.exchange.rows if self.op == "exchange" else rows_over(self.before.matrix, self.axes)

    @cached_property
    def elements(self) -> int:
        """The number of elements that a rank receives; for an exchange, the largest number of any rank."""
        n, local = prod(self.before.matrix[a] for a in self.axes), prod(self.before.local_shape(self.shape))
        match self.op:
            case "slice":
                return 0
            case "exchange":
                return received(self.before, self.after, self.shape)
            case "all_gather":
                return (n - 1) * local
            case "all_reduce":
                return -(-2 * (n - 1) * local // n)
            case _:
                return (n - 1) * local // n

    def collective(self, rank: int) -> Collective | None:
        """The collective that ``rank`` of the stage calls; ``None`` for a slice."""
        if self.op == "slice":
            return None
        if self.op == "exchange":
            row = next(row for row in self.rows if rank in row)
            sides = self.exchange.of(row.index(rank))
            moved = (sum(p.elements for p in side if p.sender != p.receiver) for side in sides)
            return Collective("all_to_all", max(moved), len(row))
        whole = self.after if self.op == "all_gather" else self.before
        return Collective(self.op, prod(whole.local_shape(self.shape)), len(self.rows[0]))
