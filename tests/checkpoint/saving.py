"""Checkpoints made from full tensors, and random layouts for them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from launcher.checkpoint import Blob, Entry, RankRecord, Strategy, commit, partial, write_rank
from launcher.checkpoint.tensorfile.safetensors import sliced, words, write_stream
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout
from launcher.plan.values.tensor_spec import TensorSpec

Full = Mapping[str, bytes]


def filled(strategy: Strategy, seed: int = 0) -> dict[str, bytes]:
    """Random bytes for each full tensor."""
    rng = random.Random(seed)
    return {name: rng.randbytes(entry.spec.nbytes) for name, entry in strategy.entries.items()}


def write_file(path: Path, tensors: Mapping[str, Blob], metadata: Mapping[str, str]) -> dict[str, str]:
    """Write a safetensors file of tensors in memory; returns the digest of each."""
    specs = {name: blob.spec for name, blob in tensors.items()}
    return dict(write_stream(path, specs, lambda name: sliced(tensors[name].data), metadata).tensors)


def cut(data: bytes, spec: TensorSpec, box: Box) -> Blob:
    """The box of a full tensor."""
    where = tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))
    piece = np.ascontiguousarray(words(data, spec)[where])
    return Blob.of(spec.dtype, box.shape, piece)


def blobs_of_rank(strategy: Strategy, rank: int, full: Full) -> dict[str, Blob]:
    """The tensors that ``rank`` has in memory."""
    out = {}
    for name, entry in strategy.entries_of(rank).items():
        box = entry.layout.box(rank)
        assert box is not None
        out[name] = cut(full[name], entry.spec, box)
    return out


def save(final: Path, strategy: Strategy, full: Full, state: Mapping[str, Any] | None = None) -> list[RankRecord]:
    """Save as all ranks, one after another, and then commit."""
    records = [
        write_rank(partial(final), rank, strategy, blobs_of_rank(strategy, rank, full))
        for rank in range(strategy.grid.size)
    ]
    commit(partial(final), final, records, state or {"step": 1})
    return records


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and its digest, as somebody without a key can do."""
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    bare = {key: value for key, value in data.items() if key not in ("digest", "mac")}
    said = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    data["digest"] = hashlib.sha256(said.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(data))


def files(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, with its bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def sharded(grid: Grid, shape: tuple[int, ...], *pp: int) -> Layout:
    """A layout with dim 0 over ``dp_shard``, on the stages ``pp``."""
    return Layout(grid, shape, (("dp_shard",), *((),) * (len(shape) - 1)), (("pp", pp),))


def small() -> Strategy:
    """Two stages x two shards; a tied table on both stages, an optimizer state, a buffer, a scalar, an uneven bf16."""
    grid = Grid.of(pp=2, dp_replicate=1, dp_shard=2, tp=1)
    return Strategy(
        grid,
        {
            "embed.weight": Entry(sharded(grid, (6, 4), 0, 1), "float32", "param", ("head.weight",)),
            "layer.weight": Entry(sharded(grid, (5, 3), 1), "bfloat16"),
            "layer.mean": Entry(Layout(grid, (3,), ((),), (("pp", (1,)),)), "float32", "buffer"),
            "optim.embed.weight.exp_avg": Entry(sharded(grid, (6, 4), 0, 1), "float32", "optim"),
            "optim.step": Entry(Layout(grid, (), ()), "int64", "optim"),
        },
    )


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    names = draw(st.permutations(["pp", "dp_shard", "tp"]))[: draw(st.integers(1, 3))]
    return Grid(tuple((name, draw(st.integers(1, 3))) for name in names))


@st.composite
def layouts(draw: st.DrawFn, grid: Grid, shape: tuple[int, ...]) -> Layout:
    """Any axes on any dim in any order; other axes are replicas or pinned to some coordinates."""
    split: list[list[str]] = [[] for _ in shape]
    at = []
    for axis, n in draw(st.permutations(grid.axes)):
        use = draw(st.sampled_from(["copy", "pin", *range(len(shape))]))
        if use == "pin":
            coords = draw(st.sets(st.integers(0, n - 1), min_size=1))
            at.append((axis, tuple(sorted(coords))))
        elif isinstance(use, int):
            split[use].append(axis)
    return Layout(grid, shape, tuple(map(tuple, split)), tuple(at))


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, tuple[TensorSpec, str, tuple[str, ...]]]:
    """A dict from names to spec, kind and aliases."""
    out: dict[str, tuple[TensorSpec, str, tuple[str, ...]]] = {}
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        kind = draw(st.sampled_from(["param", "buffer", "optim"]))
        aliases = (f"also.t{i}",) if draw(st.booleans()) else ()
        out[f"t{i}"] = (TensorSpec(shape, draw(st.sampled_from(sorted(ITEMSIZE)))), kind, aliases)
    return out


@st.composite
def strategies(draw: st.DrawFn, of: Mapping[str, tuple[TensorSpec, Any, tuple[str, ...]]]) -> Strategy:
    """The same tensors over one grid, or each over its own device matrix."""
    grid = draw(grids())
    own = draw(st.booleans())
    entries = {}
    for name, (spec, kind, aliases) in of.items():
        over = draw(matrices(grid)) if own else grid
        entries[name] = Entry(draw(layouts(over, spec.shape)), spec.dtype, kind, aliases)
    return Strategy(grid, entries)


@st.composite
def matrices(draw: st.DrawFn, grid: Grid) -> Grid:
    """The same ranks and stages over other axes."""
    axes: list[tuple[str, int]] = []
    for stage, run in groupby(grid.axes, key=lambda axis: axis[0] == "pp"):
        if stage:
            axes += run
        else:
            ranks = prod(n for _, n in run)
            while ranks > 1:
                size = draw(st.sampled_from([n for n in range(2, ranks + 1) if ranks % n == 0]))
                axes.append((f"x{len(axes)}", size))
                ranks //= size
    return Grid(tuple(axes))
