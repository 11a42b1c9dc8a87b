"""Chooses the source ranks that a destination rank reads from, if each rank's file has all that it holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

from launcher.checkpoint.layout.shards import SavedShard, overlapping_shards
from launcher.checkpoint.layout.strategy import Strategy
from launcher.plan.values.layout import Box, Layout


@dataclass(frozen=True)
class Take:
    """``box`` of the destination's tensor ``name`` is read from source ``rank``, which holds ``piece``."""

    name: str
    rank: int
    piece: Box
    box: Box


def takes(
    src: Strategy, dst: Strategy, names: Mapping[str, str], rank: int, among: Collection[int] | None = None
) -> tuple[Take, ...]:
    """Returns all that ``rank`` of ``dst`` reads, from few source ranks.

    A replicated piece is read from a rank that is read anyway, else from the lowest that has it. ``names`` is
    what ``match`` returns. ``among``, if given, are the source ranks whose files exist. Raises ``ValueError``
    if none of them has a piece.
    """
    wanted = _wanted(src, dst, names, rank)
    holders = [_holders(src.entries[names[name]].layout, piece.rank, among) for name, piece, _ in wanted]
    lost = sorted({piece.rank for (_, piece, _), ranks in zip(wanted, holders, strict=True) if not ranks})
    if lost:
        raise ValueError(f"rank {', '.join(map(str, lost))} is missing: rank {rank} is made from it")

    # pieces with the fewest holders first: they leave the least choice
    chosen: set[int] = set()
    out: dict[int, Take] = {}
    for i in sorted(range(len(wanted)), key=lambda i: len(holders[i])):
        name, piece, both = wanted[i]
        source = next((r for r in holders[i] if r in chosen), holders[i][0])
        chosen.add(source)
        out[i] = Take(name, source, piece.box, both)
    return tuple(out[i] for i in sorted(out))


def _wanted(
    src: Strategy, dst: Strategy, names: Mapping[str, str], rank: int
) -> list[tuple[str, SavedShard, Box]]:
    out = []
    for name, entry in dst.held(rank).items():
        box = entry.layout.box(rank)
        assert box is not None
        layout = src.entries[names[name]].layout
        out += [(name, piece, both) for piece, both in overlapping_shards(layout, box)]
    return out


def _holders(layout: Layout, lowest: int, among: Collection[int] | None) -> tuple[int, ...]:
    """Returns the ranks that hold the same piece as rank ``lowest``, the lowest of them, ascending."""
    where = layout.grid.coords(lowest)
    pinned = dict(layout.at)
    free = {axis: pinned.get(axis, range(n)) for axis, n in layout.grid.axes if axis not in layout.axes}
    places = (dict(zip(free, at, strict=True)) for at in product(*free.values()))
    ranks = sorted(layout.grid.rank(**where | place) for place in places)
    return tuple(ranks) if among is None else tuple(r for r in ranks if r in among)
