"""Converts the launcher's strategies to MindSpore's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from launcher.checkpoint.layout.strategy import STAGE, Strategy, stages
from launcher.extras.mindspore.strategy import SAVED, OperatorParts, Slicing, StrategyFile
from launcher.plan.values.grid import Grid, RankSpan, axis_spans
from launcher.plan.values.layout import DimSpans, Layout, joined


def stage_files(strategy: Strategy) -> tuple[StrategyFile, ...]:
    """Returns one file per stage; a tensor of several stages is in the file of each, under its first name.

    If several axes shard dim 0, the inner ones are written as MindSpore's optimizer sharding: all axes, or
    all but the outermost. They must be the innermost axes that shard no other dim. Raises ``ValueError`` with
    every tensor whose layout MindSpore cannot express: one that is ragged, or that only some ranks of a stage
    hold.
    """
    axes = {grid: _axes(grid) for grid in (strategy.grid, *strategy.other_grids)}
    problems: list[str] = []
    slicings: dict[str, Slicing] = {}
    for name, entry in strategy.entries.items():
        try:
            slicings[name] = _slicing(entry.layout, axes[entry.layout.grid])
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ValueError("MindSpore has no such layout:\n" + "\n".join(f"  {f}" for f in problems))
    return tuple(_file(strategy, slicings, stage) for stage in range(strategy.stages))


def _file(strategy: Strategy, slicings: dict[str, Slicing], stage: int) -> StrategyFile:
    here = {n: slicings[n] for n, e in strategy.entries.items() if stage in stages(e.layout)}
    # readers take the stage from the operators; like all operators with layouts, these list no slices
    operators = tuple(OperatorParts(f"Parameter_{name}", stage) for name in here) or (
        OperatorParts("Stage", stage),
    )
    return StrategyFile(SAVED, operators, here)


def _axes(grid: Grid) -> tuple[str, ...]:
    """Returns the axes of the ranks within a stage, outermost first."""
    axes = [axis for axis, size in grid.axes if axis != STAGE or size > 1]
    if STAGE in axes[1:]:
        raise ValueError(
            f"grid {dict(grid.axes)}: MindSpore requires the stages to be the outermost axis ({STAGE})"
        )
    return tuple(axis for axis in axes if axis != STAGE)


@dataclass(frozen=True)
class _Cut:
    """``dims`` has the axes that cut each dim; optimizer sharding cuts dim 0 into ``shards`` more parts."""

    dims: tuple[tuple[str, ...], ...]
    shards: int


def _slicing(layout: Layout, axes: Sequence[str]) -> Slicing:
    _check(layout)
    cut = _cut(layout, axes)
    number = {axis: i for i, axis in enumerate(reversed(axes))}
    devices = tuple(layout.grid[axis] for axis in axes) or (1,)
    dims = tuple(tuple(number[axis] for axis in dim) for dim in cut.dims)
    plain = Slicing(devices, dims, nested=any(len(dim) > 1 for dim in dims), shape=layout.shape)

    # without optimizer sharding, shard_size and shard_step are 0
    if cut.shards == 1:
        return plain
    return replace(plain, shard_size=cut.shards, shard_step=_step(layout, axes, cut))


def _check(layout: Layout) -> None:
    for axis, _ in layout.at:
        if axis != STAGE:
            raise ValueError(f"only some coordinates of axis {axis} hold it")
    if STAGE in layout.axes:
        raise ValueError(f"its slices are on several stages (axis {STAGE})")
    for dim, (n, names) in enumerate(zip(layout.shape, layout.split, strict=True)):
        parts = prod(layout.grid[axis] for axis in names)
        if n % parts:
            raise ValueError(f"ragged: dim {dim} of {list(layout.shape)} does not divide into {parts} parts")


def _cut(layout: Layout, axes: Sequence[str]) -> _Cut:
    """Returns the cuts of a layout, with optimizer sharding if that leaves at most one axis on dim 0.

    Otherwise dim 0 keeps all its axes.
    """
    split = tuple(
        tuple(axis for axis in dim if axis in axes and layout.grid[axis] > 1) for dim in layout.split
    )
    for keep in (1, 0):
        if not split or len(split[0]) < 2:
            break
        dims = (split[0][:keep], *split[1:])
        rest = split[0][keep:]
        free = [axis for axis in axes if layout.grid[axis] > 1 and not any(axis in dim for dim in dims)]
        if tuple(free[-len(rest) :]) == rest:
            return _Cut(dims, prod(layout.grid[axis] for axis in rest))
    return _Cut(split, 1)


def _step(layout: Layout, axes: Sequence[str], cut: _Cut) -> int:
    """Returns the distance between ranks with the same slice; if it varies, the mean, as in MindSpore."""
    used = {axis for dim in cut.dims for axis in dim}
    free = [span for axis, span in layout.grid.spans.items() if axis in axes and axis not in used]

    # the distance between the first and the last rank with the same slice
    last = sum((span.size - 1) * span.stride for span in free)
    return last // (prod(span.size for span in free) - 1)


def cuts(s: Slicing) -> DimSpans:
    """Returns the spans that cut each dim; those of optimizer sharding are the last ones of dim 0.

    Raises ``ValueError`` if optimizer sharding cannot be expressed as spans.

    >>> cuts(Slicing((2, 2, 2), ((0,), (1,)), shard_size=-1, shard_step=4))
    ((RankSpan(stride=1, size=2), RankSpan(stride=4, size=2)), (RankSpan(stride=2, size=2),))
    """
    spans = axis_spans(s.devices)[::-1]  # MindSpore numbers axes from the innermost

    # optimizer sharding is over the innermost of the ranks that repeat the slice
    dims = [tuple(spans[axis] for axis in dim) for dim in s.dims]
    if s.shards > 1:
        used = {axis for dim in s.dims for axis in dim}
        free = joined(span for axis, span in reversed([*enumerate(spans)]) if axis not in used)
        dims[0] += _innermost(free, s.shards)
    return tuple(map(joined, dims))


def _innermost(free: Sequence[RankSpan], size: int) -> tuple[RankSpan, ...]:
    """Returns the innermost spans of ``free`` (outermost first) that together number ``size`` ranks.

    Raises ``ValueError`` if no part of ``free`` has this size.
    """
    out: list[RankSpan] = []
    remaining = size
    for span in reversed(free):
        if remaining == 1:
            break

        # the full span, or its inner part
        if remaining % span.size == 0:
            out.append(span)
            remaining //= span.size
        elif span.size % remaining == 0:
            out.append(RankSpan(span.stride, remaining))
            remaining = 1
        else:
            text = f"optimizer sharding over {size} ranks does not fit the axes {[s.size for s in free]}"
            raise ValueError(f"{text} that cut no dim; one size must divide the other")
    return tuple(reversed(out))
