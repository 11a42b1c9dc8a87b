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
            name,
            entry.aliases,
            entry.layout.shape,
            entry.dtype,
            entry.kind,
            entry.layout.split,
            stages(entry.layout),
            ranks[entry.layout.at],
            entry.spec.nbytes,
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
    lines = [
        [
            " = ".join((row.name, *row.aliases)),
            "x".join(map(str, row.shape)) or "-",
            row.dtype,
            row.kind,
            " | ".join("*".join(axes) or "-" for axes in row.split) if any(row.split) else "-",
            spans(row.stages),
            spans(row.ranks),
            str(row.nbytes),
        ]
        for row in rows
    ]
    return table(head, lines, right=[7])


def _ranks(strategy: Strategy, at: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[int, ...]:
    """Those at the pinned coordinates, ascending."""
    pinned, grid = dict(at), strategy.grid
    axes = [axis for axis, _ in grid.axes]
    places = product(*(pinned.get(axis, range(n)) for axis, n in grid.axes))
    return tuple(grid.rank(**dict(zip(axes, place, strict=True))) for place in places)
