"""A table of the tensors of a strategy: how each is cut, and which ranks hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from launcher.checkpoint.layout.strategy import Kind, Strategy, stages
from launcher.checkpoint.text_table import table
from launcher.plan.values.grid import Grid
from launcher.plan.values.text import bytes_text, spans


@dataclass(frozen=True)
class Holding:
    """How one tensor is held.

    ``nbytes`` is the size of the full tensor. ``split`` has the axes that cut each dim, ``ranks`` all ranks
    that hold a piece. ``matrix`` has the axes and their sizes if they differ from the strategy's grid.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    split: tuple[tuple[str, ...], ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    nbytes: int
    matrix: tuple[tuple[str, int], ...] = ()


def holdings(strategy: Strategy) -> tuple[Holding, ...]:
    """Returns one ``Holding`` per tensor, in the order of the strategy."""
    places = {(e.layout.grid, e.layout.at) for e in strategy.entries.values()}
    ranks = {place: _ranks(*place) for place in places}

    return tuple(
        Holding(
            name=name,
            aliases=entry.aliases,
            shape=entry.layout.shape,
            dtype=entry.dtype,
            kind=entry.kind,
            split=entry.layout.split,
            stages=stages(entry.layout),
            ranks=ranks[entry.layout.grid, entry.layout.at],
            nbytes=entry.spec.nbytes,
            matrix=entry.layout.grid.axes if entry.layout.grid != strategy.grid else (),
        )
        for name, entry in strategy.entries.items()
    )


def inspect(strategy: Strategy) -> str:
    """Returns ``holdings`` as a table below a line of totals."""
    rows = holdings(strategy)
    total = bytes_text(sum(row.nbytes for row in rows))
    grid = _axes(strategy.grid.axes) or "no axes"
    head = f"{len(rows)} tensors, {total}, {strategy.grid.size} ranks ({grid})"
    return f"{head}\n{_text(rows)}\n"


def _axes(sizes: Sequence[tuple[str, int]]) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in sizes)


def _text(rows: Sequence[Holding]) -> str:
    head = ["tensor", "shape", "dtype", "kind", "split", "stages", "ranks", "bytes"]
    return table(head, [_cells(row) for row in rows], right=[7])


def _cells(row: Holding) -> list[str]:
    names = " = ".join((row.name, *row.aliases))
    shape = "x".join(map(str, row.shape)) or "-"
    split = " | ".join("*".join(axes) or "-" for axes in row.split)
    if not any(row.split):
        split = "-"
    elif row.matrix:
        split += f" of {_axes(row.matrix)}"
    return [names, shape, row.dtype, row.kind, split, spans(row.stages), spans(row.ranks), str(row.nbytes)]


def _ranks(grid: Grid, at: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[int, ...]:
    """Returns the ranks at the pinned coordinates ``at``, ascending."""
    pinned = dict(at)
    axes = [axis for axis, _ in grid.axes]
    places = product(*(pinned.get(axis, range(n)) for axis, n in grid.axes))
    return tuple(grid.rank(**dict(zip(axes, place, strict=True))) for place in places)
