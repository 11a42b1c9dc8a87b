"""Verifies digests, and lists which ranks hold each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import xxhash

from launcher.checkpoint.layout.shards import saved_shards, untiled
from launcher.checkpoint.layout.strategy import Kind, Strategy, stages
from launcher.checkpoint.manifest import MANIFEST
from launcher.checkpoint.read import Checkpoint, check_digest, file_header, open_checkpoint
from launcher.checkpoint.tensorfile.mmap_window import Window
from launcher.checkpoint.tensorfile.safetensors import Header
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.plan.values.grid import Grid
from launcher.plan.values.text import bytes_text, spans


def verify(folder: Path, trust: Trust = ANYONE) -> list[str]:
    """Reads the entire checkpoint and returns every problem, each naming its file; empty if there is none.

    ``trust`` names the key with which the MAC of the checkpoint must be made.
    """
    try:
        checkpoint = open_checkpoint(folder, trust)
    except (ValueError, OSError) as error:
        return [str(error)]
    return [*_strays(checkpoint), *_gaps(checkpoint), *_files(checkpoint, _tensor_files(checkpoint))]


def damaged(folder: Path, trust: Trust, part: int, parts: int) -> list[str]:
    """Returns the problems of every ``parts``-th tensor file, starting with file number ``part`` (from 0)."""
    try:
        checkpoint = open_checkpoint(folder, trust)
    except (ValueError, OSError) as error:
        return [str(error)]
    return [*_files(checkpoint, _tensor_files(checkpoint)[part::parts])]


def _tensor_files(checkpoint: Checkpoint) -> list[str]:
    return [path for path in sorted(checkpoint.manifest.files) if path.startswith("rank_")]


def _strays(checkpoint: Checkpoint) -> Iterator[str]:
    known = {MANIFEST, *checkpoint.manifest.files}
    for path in sorted(checkpoint.folder.rglob("*")):
        if not path.is_dir() and path.relative_to(checkpoint.folder).as_posix() not in known:
            yield f"{path}: not part of this checkpoint: the manifest does not list it"


def _gaps(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields the tensors whose shards do not tile the full tensor."""
    for name, entry in checkpoint.strategy.entries.items():
        gap = untiled(entry.layout.shape, [shard.box for shard in saved_shards(entry.layout)])
        if gap:
            yield f"{checkpoint.folder}: tensor {name}: {gap}"


def _files(checkpoint: Checkpoint, paths: Sequence[str]) -> Iterator[str]:
    window = Window(checkpoint.key)
    for path in paths:
        folder, file = path.split("/")
        try:
            header = file_header(checkpoint, int(folder.removeprefix("rank_")), file)
        except (ValueError, OSError) as error:
            yield str(error)
            continue
        yield from _tensors(checkpoint, path, header, window)


def _tensors(checkpoint: Checkpoint, file: str, header: Header, window: Window) -> Iterator[str]:
    for name, slot in header.entries.items():
        digest = xxhash.xxh3_128()
        try:
            for chunk in window.chunks(checkpoint.folder / file, slot):
                digest.update(chunk)
            check_digest(checkpoint, file, name, digest.hexdigest())
        except ValueError as error:
            yield str(error)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Returns ``rows`` as aligned text without trailing spaces; columns in ``right`` are right-aligned.

    >>> print(table(["name", "bytes"], [["a.weight", "12"], ["b", "4096"]], right=[1]))
    name      bytes
    a.weight     12
    b          4096
    """
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    sides = [">" if i in right else "<" for i in range(len(head))]
    lines = ("  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)) for row in every)
    return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True)
class Holding:
    """How one tensor is stored.

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
    """Returns the ranks at the pinned coordinates ``at``, in ascending order."""
    pinned = dict(at)
    axes = [axis for axis, _ in grid.axes]
    places = product(*(pinned.get(axis, range(n)) for axis, n in grid.axes))
    return tuple(grid.rank(**dict(zip(axes, place, strict=True))) for place in places)
