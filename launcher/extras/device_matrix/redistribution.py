"""The cheapest path of collectives from one layout to another."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, count
from math import prod
from typing import Literal

from launcher.extras.device_matrix.all_to_all_v import (
    Exchange,
    Rows,
    exchange,
    on_common_mesh,
    received,
    rows_over,
)
from launcher.extras.device_matrix.layout import TensorLayout

Op = Literal["slice", "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "exchange"]


@dataclass(frozen=True)
class Collective:
    """The collective that one rank calls among ``ranks`` ranks.

    ``elements`` are counted as in torch: those of the output of a gather, or of the input of a scatter. For
    an exchange, they are the larger of the elements sent and received.
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
        """The pieces that ranks send to each other, if this step is an "exchange"."""
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
        """Returns the collective that ``rank`` of the stage calls; ``None`` for a slice."""
        if self.op == "slice":
            return None
        if self.op == "exchange":
            row = next(row for row in self.rows if rank in row)
            sides = self.exchange.of(row.index(rank))
            moved = (sum(p.elements for p in side if p.sender != p.receiver) for side in sides)
            return Collective("all_to_all", max(moved), len(row))
        full = self.after if self.op == "all_gather" else self.before
        return Collective(self.op, prod(full.local_shape(self.shape)), len(self.rows[0]))


LATENCY = 1 << 19
"""The fixed cost of a collective, as the bytes that a link of 50 GB/s sends in 10 us."""


def cheapest(src: TensorLayout, dst: TensorLayout, shape: tuple[int, ...], itemsize: int) -> tuple[Step, ...]:
    """Returns the cheapest steps by bytes received and ``LATENCY`` for each collective.

    Among equally cheap ones, the steps with fewer exchanges win. A single exchange receives the fewest bytes
    possible, in one collective. So it is the last step wherever no regular collective does as well, and the
    only one if the two layouts have no common mesh. The search is needed for the sums before it.
    """
    pair = on_common_mesh(src, dst)
    start, goal = pair if pair is not None else (src.canonical, dst.canonical)
    ticks = count()
    came: dict[TensorLayout, tuple[TensorLayout, Step] | None] = {start: None}
    spent = {start: (0, 0)}
    heap = [(0, 0, 0, next(ticks), start)]
    while heap:
        layout = heapq.heappop(heap)[-1]
        if layout == goal:
            return _joined(_path(came, goal))
        for step in _steps(layout, goal, shape):
            cost, exchanges = spent[layout]
            if step.op != "slice":
                cost += step.elements * itemsize + LATENCY
            so_far = (cost, exchanges + (step.op == "exchange"))
            if step.after not in spent or so_far < spent[step.after]:
                came[step.after], spent[step.after] = (layout, step), so_far
                least = _least(step.after, goal, shape, itemsize)
                heapq.heappush(heap, (so_far[0] + least, so_far[1], least, next(ticks), step.after))
    raise AssertionError(f"no way from {src} to {dst}")


def _least(at: TensorLayout, goal: TensorLayout, shape: tuple[int, ...], itemsize: int) -> int:
    """Returns a lower bound, in bytes, for the cost of all steps from ``at`` to ``goal``."""
    if not at.partial:
        lacks = received(at, goal, shape)
        return lacks * itemsize + LATENCY if lacks else 0

    # A rank lacks its entire part. A sum of n terms takes n - 1 receives, and each further copy one more.
    terms, needed = prod(at.matrix[a] for a in at.partial), prod(goal.local_shape(shape))
    copies = goal.ranks // prod(goal.slices)
    among_all = prod(shape) * (terms + copies - 2) // goal.ranks
    ahead = at.matrix == goal.matrix and all(
        a == b[: len(a)] for a, b in zip(at.dims, goal.dims, strict=True)
    )
    return max(needed, among_all) * itemsize + (1 if ahead else 2) * LATENCY


def _steps(at: TensorLayout, goal: TensorLayout, shape: tuple[int, ...]) -> Iterator[Step]:
    """Yields every possible next step."""
    if at.partial:
        steps = _sums(at, goal, shape)
    elif at.matrix != goal.matrix:
        steps = iter(())
    else:
        steps = _towards(at, goal, shape)
    yield from (step for step in steps if step.after.divides(shape))
    if not at.partial:
        op: Op = "exchange" if received(at, goal, shape) else "slice"
        yield Step(op, at, goal, shape)


def _sums(at: TensorLayout, goal: TensorLayout, shape: tuple[int, ...]) -> Iterator[Step]:
    """Yields steps that sum terms, and slices that divide a sum among ranks which would repeat it."""
    for a in at.repeated:
        for d, _ in _places(at, goal, shape, (a,)):
            yield Step("slice", at, _cut(at, d, (a,)), shape)
    for k in range(1, len(at.partial) + 1):
        for axes in combinations(at.partial, k):
            unsummed = tuple(a for a in at.partial if a not in axes)
            less = TensorLayout(at.matrix, at.dims, unsummed)
            yield Step("all_reduce", at, less, shape, axes=axes)
            for d, order in _places(at, goal, shape, axes):
                yield Step("reduce_scatter", at, _cut(less, d, order), shape, dim=d, axes=order)


def _places(
    at: TensorLayout, goal: TensorLayout, shape: tuple[int, ...], axes: tuple[int, ...]
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the dims that ``axes`` may cut, each with an order of the axes.

    These are all the cuts that ``goal`` has too, and one cut that is undone later. That one is on a dim that
    ``goal`` cuts no further, if there is one. Undoing it costs the same on each of these dims, so the first
    is enough.
    """
    n = prod(at.matrix[a] for a in axes)
    fits = [d for d, local in enumerate(at.local_shape(shape)) if local % n == 0]
    as_goal, ends = [], []
    for d in fits if at.matrix == goal.matrix else ():
        have, goal_axes = at.dims[d], goal.dims[d]
        more = goal_axes[len(have) :]
        if have == goal_axes[: len(have)] and more and sorted(more[: len(axes)]) == sorted(axes):
            as_goal.append((d, more[: len(axes)]))
        elif have == goal_axes[: len(have)] and more and set(more) <= set(axes):
            as_goal.append((d, more + tuple(a for a in axes if a not in more)))
        elif have[: len(goal_axes)] == goal_axes:
            ends.append(d)
    return as_goal + [(d, axes) for d in (ends or fits)[:1] if (d, axes) not in as_goal]


def _towards(at: TensorLayout, goal: TensorLayout, shape: tuple[int, ...]) -> Iterator[Step]:
    """Yields steps over one matrix after which all or the first of ``goal``'s axes cut each changed dim."""
    for d, (have, goal_axes) in enumerate(zip(at.dims, goal.dims, strict=True)):
        more = goal_axes[len(have) : len(have) + 1]
        if have == goal_axes[: len(have)] and more and more[0] in at.repeated:
            yield Step("slice", at, _cut(at, d, more), shape)
        for k in range(1, len(have) + 1):
            head, tail = have[:-k], have[-k:]
            if head != goal_axes[: len(head)]:
                continue
            less = _with(at, d, head)
            yield Step("all_gather", at, less, shape, dim=d, axes=tail)
            for e, (other, wish) in enumerate(zip(at.dims, goal.dims, strict=True)):
                to = wish[len(other) : len(other) + k]
                if e != d and other == wish[: len(other)] and sorted(to) == sorted(tail):
                    yield Step("all_to_all", at, _cut(less, e, to), shape, d, tail, e, to)


def _cut(layout: TensorLayout, dim: int, axes: tuple[int, ...]) -> TensorLayout:
    return _with(layout, dim, layout.dims[dim] + axes)


def _with(layout: TensorLayout, dim: int, axes: tuple[int, ...]) -> TensorLayout:
    dims = (*layout.dims[:dim], axes, *layout.dims[dim + 1 :])
    return TensorLayout(layout.matrix, dims, layout.partial)


def _path(came: dict[TensorLayout, tuple[TensorLayout, Step] | None], goal: TensorLayout) -> list[Step]:
    steps = []
    back = came[goal]
    while back is not None:
        steps.append(back[1])
        back = came[back[0]]
    return steps[::-1]


def _joined(steps: list[Step]) -> tuple[Step, ...]:
    """Merges consecutive slices into one."""
    out: list[Step] = []
    for step in steps:
        if out and out[-1].op == step.op == "slice":
            out[-1] = replace(out[-1], after=step.after)
        else:
            out.append(step)
    return tuple(out)


@dataclass(frozen=True)
class Redistribution:
    """The steps that take a tensor of ``shape`` from ``src`` to ``dst``; none if both layouts are equal."""

    src: TensorLayout
    dst: TensorLayout
    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def collectives(self) -> int:
        return sum(step.op != "slice" for step in self.steps)

    @cached_property
    def elements(self) -> int:
        """The number of elements that a rank receives."""
        return sum(step.elements for step in self.steps)

    def cost(self, itemsize: int) -> int:
        """Returns the cost in bytes, including ``LATENCY`` for each collective."""
        return self.elements * itemsize + self.collectives * LATENCY

    def traffic(self, rank: int) -> tuple[Collective, ...]:
        """Returns the collectives that ``rank`` of the stage calls, in order."""
        calls = (step.collective(rank) for step in self.steps)
        return tuple(call for call in calls if call is not None)


@lru_cache(maxsize=1 << 16)
def redistribution(
    src: TensorLayout, dst: TensorLayout, shape: tuple[int, ...], itemsize: int = 4
) -> Redistribution:
    """Returns the cheapest redistribution by bytes received and ``LATENCY`` for each collective.

    Among equally cheap ones, one with fewer exchanges wins. ``itemsize``: bytes per element.
    """
    assert src.divides(shape), f"{src} does not cut {shape} evenly"
    assert dst.divides(shape), f"{dst} does not cut {shape} evenly"
    if src == dst or src.canonical == dst.canonical:
        return Redistribution(src, dst, shape, ())
    assert not dst.partial, f"nothing is made into terms of a sum: {dst}"
    return Redistribution(src, dst, shape, cheapest(src, dst, shape, itemsize))


def back(
    src: TensorLayout, dst: TensorLayout, terms: tuple[int, ...], shape: tuple[int, ...], itemsize: int = 4
) -> Redistribution:
    """Returns the redistribution of the gradient of a value that was moved from ``src`` to ``dst``.

    The gradient has the layout ``dst`` and consists of terms of a sum over the axes ``terms`` of its matrix.
    If ``src`` consists of terms of a sum, each term gets the full gradient of the sum.
    """
    return redistribution(TensorLayout(dst.matrix, dst.dims, terms), src.summed(), shape, itemsize)
