"""Rank folders of a small model in both formats, for tests that damage or transform them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint import (
    Blob,
    Entry,
    Strategy,
    transform_checkpoints,
)
from launcher.extras.mindspore.ckpt import write_ckpt
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.strategy import StrategyForm
from launcher.extras.mindspore.strategy_file import write_strategy
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, files, filled, write_file
from tests.extras.mindspore.truth import blobs

SHAPES = {"emb.w": (8, 8), "l-1.w": (8, 8), "norm": (4,), "scale": (), "adam_m.l-1.w": (8, 8)}
Files = dict[str, Blob]


def net(tp: int, pp: int = 1, shapes: Mapping[str, tuple[int, ...]] = SHAPES, swapped: bool = False) -> Strategy:
    """Return the strategy of the model.

    ``emb.w`` is split by rows on stage 0, ``l-1.w`` and its state by columns on the last stage; others are not split.
    """
    grid = Grid((("pp", pp), ("tp", tp)))
    entries = {}
    for name, shape in shapes.items():
        dim = None if len(shape) < 2 else int((name == "emb.w") == swapped)
        split = tuple(("tp",) if d == dim else () for d in range(len(shape)))
        at = ((("pp", (0 if name == "emb.w" else pp - 1,)),)) if pp > 1 else ()
        kind: Any = "optim" if name.startswith("adam_m") else "param"
        entries[name] = Entry(Layout(grid, shape, split, at), "float32", kind)
    return Strategy(grid, entries)


@dataclass(frozen=True)
class Home:
    """``src`` are rank folders in the form ``suffix``.

    ``src.ckpt`` and ``dst.ckpt`` are the strategies in MindSpore's form.
    """

    path: Path
    suffix: str
    src: Strategy
    dst: Strategy

    @property
    def full(self) -> dict[str, bytes]:
        return filled(self.src)

    def file(self, rank: int) -> Path:
        return self.path / "src" / f"rank_{rank}" / f"net-1_1{self.suffix}"

    def put(self, rank: int, change: Callable[[Files], object] = lambda t: None, path: Path | None = None) -> None:
        """Write the file of ``rank`` with changed tensors."""
        tensors = blobs_of_rank(self.src, rank, self.full)
        change(tensors)
        to = path or self.file(rank)
        to.parent.mkdir(parents=True, exist_ok=True)
        if self.suffix == ".ckpt":
            write_ckpt(to, {n: b.spec for n, b in tensors.items()}, lambda n: [tensors[n].data])
        else:
            write_file(to, tensors, {})

    def strategy(self, side: str, of: Strategy, form: StrategyForm = "protobuf") -> None:
        write_strategy(self.path / f"{side}.ckpt", merged_file(of), form)

    def both(self, change: Callable[[Strategy], Strategy]) -> None:
        """Change both strategies."""
        self.strategy("src", change(self.src))
        self.strategy("dst", change(self.dst))

    def call(self, **other: Any) -> None:
        given: dict[str, Any] = {
            "src_checkpoints_dir": self.path / "src", "dst_checkpoints_dir": self.path / "out", "ckpt_prefix": "out",
            "src_strategy_file": self.path / "src.ckpt", "dst_strategy_file": self.path / "dst.ckpt",
            "output_format": self.suffix[1:],
        }  # fmt: skip
        transform_checkpoints(**(given | other))

    def right(self) -> None:
        """Check that every rank of the destination has its slices of the full tensors."""
        for rank in range(self.dst.grid.size):
            found = blobs(self.path / "out" / f"rank_{rank}" / f"out{rank}{self.suffix}")
            assert {n: b for n, b in found.items() if n in self.dst.entries} == blobs_of_rank(self.dst, rank, self.full)


def made(path: Path, suffix: str, src: Strategy, dst: Strategy) -> Home:
    home = Home(path, suffix, src, dst)
    for rank in range(src.grid.size):
        home.put(rank)
    home.strategy("src", src)
    home.strategy("dst", dst)
    return home


def refused(home: Home, text: str, kind: type[Exception] = ValueError, **other: Any) -> None:
    """Check that the call fails with exactly this message and writes nothing."""
    before = files(home.path)
    found = refusal(lambda: home.call(**other), kind)
    assert found == text.format(home=home.path, suffix=home.suffix)
    assert files(home.path) == before
    assert not (home.path / "out").exists()


def cut_short(path: Path, share: float = 0.6) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
