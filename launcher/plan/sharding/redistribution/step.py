"""One step of a redistribution: a collective, or a slice, which every rank cuts from what it has."""

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
    """What one rank calls: ``elements`` of the tensor that torch counts, among ``ranks``.

    Those that a gather yields and a scatter is given; of an exchange the more of sent and received.
    """

    op: str
    elements: int
    ranks: int


@dataclass(frozen=True)
class Step:
    """From ``before`` to ``after``, tensors of ``shape``: on one matrix, but for "exchange" and "slice".

    ``axes``, outermost first, are those over which the ranks of a collective differ. "all_gather" joins what
    they cut of ``dim``, last of all; "all_to_all" too and has ``to_axes``, the same in another order, cut
    ``to_dim``; "reduce_scatter" adds up over them and has them cut ``dim``.
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
        """Of an "exchange": who sends what to whom."""
        return exchange(self.before, self.after, self.shape)

    @cached_property
    def rows(self) -> Rows:
        """Ranks of the stage that it is among; none for a slice."""
        if self.op == "slice":
            return ()
        return self.exchange.rows if self.op == "exchange" else rows_over(self.before.matrix, self.axes)

    @cached_property
    def elements(self) -> int:
        """That a rank receives; of an exchange, the rank that receives most."""
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
        """The one which ``rank`` of the stage calls; none for a slice."""
        if self.op == "slice":
            return None
        if self.op == "exchange":
            row = next(row for row in self.rows if rank in row)
            sides = self.exchange.of(row.index(rank))
            moved = (sum(p.elements for p in side if p.sender != p.receiver) for side in sides)
            return Collective("all_to_all", max(moved), len(row))
        whole = self.after if self.op == "all_gather" else self.before
        return Collective(self.op, prod(whole.local_shape(self.shape)), len(self.rows[0]))
