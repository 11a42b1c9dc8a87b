"""Who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from launcher.checkpoint.layout.strategy import Kind, Strategy, stages
from launcher.checkpoint.text_table import table
from launcher.plan.values.text import bytes_text, spans


@dataclass(frozen=True)
class Holding:
    """One tensor of ``nbytes``, whole.

    ``split`` has the axes that cut each dim, ``ranks`` all that hold a piece.
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


def holdings(strategy: Strategy) -> tuple[Holding, ...]:
    """In the order of the strategy."""
    ranks = {at: _ranks(strategy, at) for at in {e.layout.at for e in strategy.entries.values()}}

    return tuple(
        Holding(
            name=name,
            aliases=entry.aliases,
            shape=entry.layout.shape,
            dtype=entry.dtype,
            kind=entry.kind,
            split=entry.layout.split,
            stages=stages(entry.layout),
            ranks=ranks[entry.layout.at],
            nbytes=entry.spec.nbytes,
        )
        for name, entry in strategy.entries.items()
    )


def inspect(strategy: Strategy) -> str:
    """``holdings`` as a table, below what they add up to."""
    rows = holdings(strategy)
    total = bytes_text(sum(row.nbytes for row in rows))
    grid = " x ".join(f"{axis} {n}" for axis, n in strategy.grid.axes) or "no axes"
    head = f"{len(rows)} tensors, {total}, {strategy.grid.size} ranks ({grid})"
    return f"{head}\n{_text(rows)}\n"


def _text(rows: Sequence[Holding]) -> str:
    head = ["tensor", "shape", "dtype", "kind", "split", "stages", "ranks", "bytes"]
    return table(head, [_cells(row) for row in rows], right=[7])


def _cells(row: Holding) -> list[str]:
    names = " = ".join((row.name, *row.aliases))
    shape = "x".join(map(str, row.shape)) or "-"
    split = " | ".join("*".join(axes) or "-" for axes in row.split)
    if not any(row.split):
        split = "-"
    return [names, shape, row.dtype, row.kind, split, spans(row.stages), spans(row.ranks), str(row.nbytes)]


def _ranks(strategy: Strategy, at: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[int, ...]:
    """Those at the pinned coordinates, ascending."""
    pinned = dict(at)
    grid = strategy.grid
    axes = [axis for axis, _ in grid.axes]
    places = product(*(pinned.get(axis, range(n)) for axis, n in grid.axes))
    return tuple(grid.rank(**dict(zip(axes, place, strict=True))) for place in places)
