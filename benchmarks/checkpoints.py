"""Writes a transformer's parameters in any layout, for measurements; values are computed from names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from launcher.checkpoint import Entry, Strategy, commit
from launcher.checkpoint.store import partial as unfinished
from launcher.checkpoint.tensorfile.safetensors import mapped, read_header, write_stream
from launcher.checkpoint.write import RankWriter
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.rank_files import held_boxes
from launcher.extras.mindspore.strategy_file import write_strategy
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout
from launcher.plan.values.tensor_spec import TensorSpec

HIDDEN = 1024
LAYER = {
    "qkv": (3 * HIDDEN, HIDDEN),
    "out": (HIDDEN, HIDDEN),
    "up": (4 * HIDDEN, HIDDEN),
    "down": (HIDDEN, 4 * HIDDEN),
}
INNER = ("out", "down")
"""Weights that tensor parallelism cuts along their input; their pieces are strided in the full tensor."""


@dataclass(frozen=True)
class Case:
    """Two layouts of one model, by the sizes of their axes."""

    name: str
    src: Grid
    dst: Grid

    def strategies(self, mib: int) -> tuple[Strategy, Strategy]:
        return strategy(self.src, mib), strategy(self.dst, mib)


def grid(**sizes: int) -> Grid:
    """Return a grid with the axes of the planner; axes that are not passed have size 1."""
    return Grid.of(**{axis: sizes.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "tp")})


CASES = {
    "tp": Case("TP8 -> TP4", grid(tp=8), grid(tp=4)),
    "pp": Case("TP4 x PP2 -> TP2", grid(pp=2, tp=4), grid(tp=2)),
    "hsdp": Case("HSDP 2 x 4 -> 1 x 2, TP2", grid(dp_replicate=2, dp_shard=4), grid(dp_shard=2, tp=2)),
}


def shapes(mib: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of as many layers as fit into ``mib`` MiB of float32; an embedding fills the rest."""
    each = sum(rows * columns for rows, columns in LAYER.values()) + HIDDEN
    layers, rest = divmod(mib << 18, each)
    out: dict[str, tuple[int, ...]] = {"embed": (max(rest // HIDDEN // 64, 1) * 64, HIDDEN)}
    for i in range(layers):
        out |= {f"layers.{i}.{part}": shape for part, shape in LAYER.items()} | {
            f"layers.{i}.norm": (HIDDEN,)
        }
    return out


def strategy(on: Grid, mib: int) -> Strategy:
    found = shapes(mib)
    layers = max(int(name.split(".")[1]) + 1 for name in found if "." in name)
    entries = {}
    for name, shape in found.items():
        inner = name.rpartition(".")[2] in INNER
        first = ("dp_shard",) if inner else ("tp", "dp_shard")
        split = (first, ("tp",) if inner else ()) if len(shape) > 1 else ((),)
        stage = int(name.split(".")[1]) * on["pp"] // layers if "." in name else 0
        entries[name] = Entry(Layout(on, shape, split, (("pp", (stage,)),)), "float32")
    return Strategy(on, entries)


def values(name: str, box: Box, salt: str = "") -> npt.NDArray[Any]:
    """Return the values of ``box`` as float32.

    Each value is finite, and a hash of the name and of the element's indices, so it is equal in any layout.
    """
    out = np.full(box.shape, crc32((name + salt).encode()), np.uint32)
    for dim, (lo, hi, odd) in enumerate(zip(box.lo, box.hi, (2654435761, 2246822519), strict=False)):
        out += (np.arange(lo, hi, dtype=np.uint32) * np.uint32(odd)).reshape(
            -1, *(1,) * (len(box.shape) - dim - 1)
        )
    out ^= out >> 15
    return (out & 0x3FFFFFFF).view(np.float32)


def chunks(name: str, box: Box, salt: str = "") -> Iterator[memoryview]:
    yield memoryview(values(name, box, salt).reshape(-1).view(np.uint8))


def save_checkpoint(folder: Path, of: Strategy, salt: str = "") -> None:
    """Write a checkpoint of the launcher, with its manifest."""
    new = unfinished(folder)
    records = [RankWriter(new, rank, of).write(partial(chunks, salt=salt)) for rank in range(of.grid.size)]
    commit(new, folder, records, {"step": 1})


def save_rank_files(folder: Path, of: Strategy, salt: str = "") -> None:
    """Write ``rank_<k>/net.safetensors`` with all tensors of each rank, as any program would write it."""
    for rank in range(of.grid.size):
        home = folder / f"rank_{rank}"
        home.mkdir(parents=True)
        boxes = held_boxes(of, rank)
        specs = {name: TensorSpec(box.shape, "float32") for name, box in boxes.items()}
        write_stream(home / "net.safetensors", specs, partial(_chunks_of, boxes, salt=salt), {"format": "ms"})


def _chunks_of(boxes: Mapping[str, Box], name: str, salt: str) -> Iterator[memoryview]:
    return chunks(name, boxes[name], salt)


def save_strategy(path: Path, of: Strategy) -> None:
    write_strategy(path, merged_file(of), "protobuf")


def wrong(path: Path, boxes: Mapping[str, Box]) -> int:
    """Return the number of tensors that the file lacks or has with wrong values; all if there is no file."""
    if not path.is_file():
        return len(boxes)
    header = read_header(path)
    data = mapped(path)
    bad = 0
    for name, box in boxes.items():
        entry = header.entries.get(name)
        if entry is None or data[entry.start : entry.stop] != values(name, box).tobytes():
            bad += 1
    return bad


def many(on: Grid, names: Sequence[str]) -> Strategy:
    """Return matrices that are spread over the stages; only their layouts matter."""
    entries = {}
    for i, name in enumerate(names):
        stage = i * on["pp"] // len(names)
        layout = Layout(on, (4096 + i % 40, 1024), (("dp_shard",), ("tp",)), (("pp", (stage,)),))
        entries[name] = Entry(layout, "bfloat16")
    return Strategy(on, entries)
