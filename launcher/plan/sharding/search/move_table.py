"""The cost of moving one value, for every state of the operators that make and take it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launcher.plan.sharding.op_graph import Value
from launcher.plan.sharding.search.cost import CostModel, move_cost
from launcher.plan.sharding.search.elimination import Array
from launcher.plan.sharding.tensor_layout import TensorLayout


class MoveTable:
    """A table with one axis for each of ``sizes``, in which layouts are numbered."""

    def __init__(self, value: Value, model: CostModel, sizes: Sequence[int]) -> None:
        self.value, self.model, self.sizes = value, model, sizes
        self.layouts: list[TensorLayout] = []
        self._number: dict[TensorLayout, int] = {}

    def states(self, layouts: Sequence[TensorLayout], axis: int | None) -> Array:
        """Returns the numbers of the layouts of the states along ``axis``; ``None``: one layout for all."""
        numbers = np.array([self._add(x) for x in layouts])
        return numbers.reshape([-1 if i == axis else 1 for i in range(len(self.sizes))])

    def priced(
        self, source: Array, ways: Sequence[Array], written: TensorLayout | None, *, last_only: bool
    ) -> tuple[Array, Array]:
        """Returns seconds, and bytes kept on a rank, of the moves of a value made as ``source``.

        They are those of ``value_cost``. ``last_only``: only the move to the last of ``ways``; terms of a sum
        then rest, summed, in the layout in which they are made.
        """
        first = ways[0] if ways and not last_only else source
        rest = self.states([written], None) if written else self._settled(source, first)
        seconds, memory = np.zeros(self.sizes), np.zeros(self.sizes)
        moves = [] if last_only else [(source, rest, np.True_)]
        for i, way in enumerate(ways):
            new = np.True_
            for earlier in ways[:i]:
                new = new & (earlier != way)
            if not last_only or i == len(ways) - 1:
                moves.append((rest, way, new))
        for a, b, new in moves:
            cost, kept = self._moves(a, b)
            seconds += np.where(new, cost, 0)
            memory += np.where(new, kept, 0)
        return seconds, memory

    def _add(self, layout: TensorLayout) -> int:
        if layout not in self._number:
            self._number[layout] = len(self.layouts)
            self.layouts.append(layout)
        return self._number[layout]

    def _settled(self, source: Array, first: Array) -> Array:
        """The layout at rest of each source; a sum of terms rests as it is first taken."""
        partial = np.array([bool(x.partial) for x in self.layouts])[source]
        whole = np.array([self._add(x.summed().canonical) for x in list(self.layouts)])
        return np.where(partial, whole[first], source)

    def _moves(self, src: Array, dst: Array) -> tuple[Array, Array]:
        src, dst = np.broadcast_arrays(src, dst)
        pairs, place = np.unique(src.astype(np.int64) * len(self.layouts) + dst, return_inverse=True)
        costs = [move_cost(*self._pair(int(p)), self.value, self.model) for p in pairs]
        seconds = np.array([c.predicted for c in costs])[place].reshape(src.shape)
        return seconds, np.array([c.memory.total for c in costs], dtype=float)[place].reshape(src.shape)

    def _pair(self, pair: int) -> tuple[TensorLayout, TensorLayout]:
        a, b = divmod(pair, len(self.layouts))
        return self.layouts[a], self.layouts[b]
