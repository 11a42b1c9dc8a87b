"""Ways to damage a checkpoint, each done to a copy of a good one."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import chunks, grid, save_strategy
from launcher.checkpoint import Entry, Strategy
from launcher.checkpoint.tensorfile.safetensors import write_stream
from launcher.extras.mindspore.rank_files import held_boxes
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from launcher.plan.values.tensor_spec import TensorSpec

MARK = "pickle-was-run"
SHAPES = {"embed": (256, 128), "down": (128, 256), "norm": (128,)}


def net(on: Grid, prefix: str = "", swapped: bool = False) -> Strategy:
    """Return the strategy of a small model: ``embed`` is on the first stage, the other tensors on the last.

    ``embed`` is split by rows and ``down`` by columns; ``swapped`` exchanges the two.
    """
    entries = {}
    for name, shape in SHAPES.items():
        cut = ("embed" if swapped else "down") == name
        split: tuple[tuple[str, ...], ...] = ((),)
        if len(shape) == 2:
            split = ((), ("tp",)) if cut else (("tp",), ())
        stage = 0 if name == "embed" else on["pp"] - 1
        entries[prefix + name] = Entry(Layout(on, shape, split, (("pp", (stage,)),)), "float32")
    return Strategy(on, entries)


@dataclass(frozen=True)
class GoodCheckpoint:
    """A good checkpoint in one program's form: a folder, and the pattern of its files.

    ``older``: the folder of an earlier save with the same layout.
    """

    form: str
    folder: Path
    older: Path
    pattern: str

    def file(self, rank: int) -> Path:
        return self.folder / self.pattern.format(rank)


Damage = Callable[[GoodCheckpoint], object]


def missing(source: GoodCheckpoint) -> None:
    source.file(3).unlink()


def short(source: GoodCheckpoint) -> None:
    os.truncate(source.file(3), source.file(3).stat().st_size * 6 // 10)


def flipped(source: GoodCheckpoint) -> None:
    """Flip one bit in the middle of the file, where the tensors are."""
    data = bytearray(source.file(1).read_bytes())
    data[len(data) // 2] ^= 4
    source.file(1).write_bytes(data)


def exchanged(source: GoodCheckpoint) -> None:
    one, two = source.file(2), source.file(3)
    spare = one.with_name("spare")
    one.rename(spare)
    two.rename(one)
    spare.rename(two)


def aged(source: GoodCheckpoint) -> None:
    """Replace one rank's file with an older one, as a save in place leaves it that is killed too early."""
    shutil.copy(replace(source, folder=source.older).file(1), source.file(1))


def crowded(source: GoodCheckpoint) -> None:
    """Add a file of a rank that no longer exists."""
    source.file(4).parent.mkdir(exist_ok=True)
    shutil.copy(source.file(3), source.file(4))


class Runs:
    """An object whose pickle creates the folder ``path`` when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def coded(source: GoodCheckpoint) -> None:
    """Replace the file that is read first with a pickle that runs code; ``torch.save`` wraps DeepSpeed's."""
    import torch

    first = {"dcp": source.folder / ".metadata", "own": source.folder / "manifest.json"}.get(source.form)
    value = Runs(source.folder.parent / MARK)
    if source.form == "deepspeed":
        torch.save(value, source.file(0))
    else:
        (first or source.file(0)).write_bytes(pickle.dumps(value))


def tampered(rank: int, change: Callable[[dict[str, TensorSpec]], object]) -> Damage:
    """Return damage that rewrites the file of ``rank`` with the tensors that ``change`` leaves."""

    def act(source: GoodCheckpoint) -> None:
        boxes = held_boxes(net(grid(tp=4)), rank)
        specs = {name: TensorSpec(box.shape, "float32") for name, box in boxes.items()}
        change(specs)

        def data(name: str) -> list[memoryview]:
            raw = b"".join(chunks(name, boxes[name]))
            return [memoryview(raw.ljust(specs[name].nbytes, b"\0")[: specs[name].nbytes])]

        write_stream(source.file(rank), specs, data, {"format": "ms"})

    return act


def strategy(of: Strategy) -> Damage:
    """Return damage that replaces the strategy file of the source with that of ``of``."""
    return lambda source: save_strategy(source.folder.with_suffix(".ckpt"), of)


def retyped(specs: dict[str, TensorSpec]) -> None:
    specs["down"] = TensorSpec(specs["down"].shape, "float64")


def reshaped(specs: dict[str, TensorSpec]) -> None:
    rows, columns = specs["down"].shape
    specs["down"] = TensorSpec((rows // 2, columns), "float32")


EVERYWHERE: Mapping[str, Damage] = {
    "the file of a rank is missing": missing,
    "the file of a rank is cut short": short,
    "one bit of a tensor is flipped": flipped,
    "the files of two ranks are swapped": exchanged,
    "one rank's file is of an older save": aged,
    "a file of an older, larger run is left in the folder": crowded,
    "a file is a pickle that runs something": coded,
}
STAGES: Mapping[str, Damage] = {
    "two stages to one: a rank of the last is missing": missing,
    "two stages to one: a file of the last is cut short": short,
}
RANK_FILES: Mapping[str, Damage] = {
    "a parameter is not in one rank's file": tampered(3, lambda specs: specs.pop("down")),
    "a slice of another dtype in one rank's file": tampered(3, retyped),
    "a slice of another shape in one rank's file": tampered(3, reshaped),
    "the strategy has the axes of two tensors swapped": strategy(net(grid(tp=4), swapped=True)),
    "the strategy is for fewer ranks than there are files": strategy(net(grid(tp=2))),
    "the strategy is of another model": strategy(net(grid(tp=4), prefix="other.")),
}
