"""The contents of the fixtures, and where MindSpore puts each slice, computed rank by rank without our code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.checkpoint import read_full
from launcher.checkpoint.tensorfile.safetensors import Blob, words
from launcher.extras.mindspore.ckpt import open_ckpt

FIXTURES = Path(__file__).parent / "fixtures"
CASES = sorted(path for path in (FIXTURES / "cases").iterdir())
Array = npt.NDArray[Any]
Index = tuple[slice, ...]


def exactly(message: str) -> str:
    """Return a pattern that matches the full message only."""
    return rf"\A{re.escape(message)}\Z"


def case(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "case.json").read_text())
    return data


def blobs(path: Path) -> dict[str, Blob]:
    if path.suffix == ".safetensors":
        return dict(read_full(path))
    file = open_ckpt(path)
    return {name: file.blob(name) for name in file.entries}


def array(blob: Blob) -> Array:
    return words(blob.data, blob.spec)


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the one file of each rank."""
    homes = {int(home.name.removeprefix("rank_")): home for home in folder.glob("rank_*")}
    return {rank: next(iter(homes[rank].iterdir())) for rank in sorted(homes)}


def coords(devices: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(rank, tuple(devices)))


def index(layout: Mapping[str, Any], shape: Sequence[int], rank: int) -> Index:
    """Return where the slice of ``rank``, counted within its stage, is in the full tensor."""
    devices = layout["dev_matrix"]
    dims = [d if isinstance(d, list) else [d] for d in layout["tensor_map"]]

    def plain(r: int) -> list[tuple[int, int]]:
        out = []
        for dim in dims:
            axes = [len(devices) - 1 - a for a in dim if a != -1]
            at = 0
            for axis in axes:
                at = at * devices[axis] + coords(devices, r)[axis]
            out.append((at, prod(devices[axis] for axis in axes)))
        return out

    bounds = [(at * (n // parts), n // parts) for (at, parts), n in zip(plain(rank), shape, strict=True)]
    size = layout["opt_weight_shard_size"]
    if size and layout["opt_weight_shard_step"] and bounds:
        group = [r for r in range(prod(devices)) if plain(r) == plain(rank)]
        size = len(group) if size == -1 else size
        length = bounds[0][1] // size
        bounds[0] = (bounds[0][0] + group.index(rank) % size * length, length)
    return tuple(slice(lo, lo + n) for lo, n in bounds)
