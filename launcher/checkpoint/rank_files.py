"""Plain files, one a rank, each with all that the rank holds: no manifest, no digests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy.typing as npt

from launcher.checkpoint.blob import described
from launcher.checkpoint.choose import Take, takes
from launcher.checkpoint.files import blob_at, mapped, sliced, write_stream
from launcher.checkpoint.gather import Fill, gathered, slices
from launcher.checkpoint.header import Header, read_header
from launcher.checkpoint.manifest import stamp
from launcher.checkpoint.strategy import Entry, Strategy
from launcher.checkpoint.window import Window
from launcher.plan.facts import TensorSpec
from launcher.plan.grid import Grid
from launcher.plan.layout import Box, Layout


class RankFiles:
    """The files of some ranks or of all, which fit the strategy that they were saved with.

    ``loose`` are tensors of a single element that no strategy lists, equal wherever they are: step counters, say.
    """

    def __init__(self, paths: Mapping[int, Path], strategy: Strategy, known: Collection[str], *, own: bool) -> None:
        """Names in ``known`` are never loose; ``own`` is False for a strategy made of their headers.

        Raises ``ValueError`` with every flaw of every file.
        """
        self.paths, self.strategy, self._own = paths, strategy, own
        self.headers = {rank: read_header(path) for rank, path in paths.items()}
        self.loose = _loose(self.headers, {*strategy.named, *known})
        if found := [f"{paths[r]}: {flaw}" for r in paths for flaw in self._flaws(r)] or [*self._changing()]:
            raise ValueError("\n".join(found))

    def write(self, dst: Strategy, names: Mapping[str, str], rank: int, path: Path) -> None:
        """All that ``rank`` of ``dst`` holds, and what is loose; ``names`` as ``match`` has them."""
        boxes, window = held_boxes(dst, rank), Window()
        chosen: dict[str, list[Take]] = {name: [] for name in boxes}
        for take in takes(self.strategy, dst, names, rank, self.paths):
            chosen[take.name].append(take)

        def chunks(name: str) -> Iterator[memoryview]:
            if name in self.loose:
                source = self.loose[name]
                return sliced(blob_at(mapped(self.paths[source]), self.headers[source], name).data)
            return gathered(boxes[name], dst.entries[name].dtype, self._fill(window, names[name], chosen[name]))

        specs = {name: self.headers[source].entries[name].spec for name, source in self.loose.items()}
        write_held(path, dst, rank, specs, chunks)

    def _fill(self, window: Window, name: str, chosen: list[Take]) -> Fill:
        def fill(part: Box, out: npt.NDArray[Any]) -> None:
            for take in chosen:
                if (both := take.box & part) is not None:
                    slot = self.headers[take.rank].entries[name]
                    at = slices(both.within(take.piece))
                    window.copy(self.paths[take.rank], slot, at, out[slices(both.within(part))])

        return fill

    def _flaws(self, rank: int) -> Iterator[str]:
        header, boxes = self.headers[rank], held_boxes(self.strategy, rank)
        mark = stamp(rank, self.strategy.grid.size, self.strategy.digest)
        for key in ("rank", "world", "strategy") if self._own else ("rank", "world"):
            found, want = header.metadata.get(f"launcher.{key}"), mark[f"launcher.{key}"]
            if found is not None and found != want:
                yield f"a file from another place: it says {key} {found}, not {want}"
        if absent := [name for name in boxes if name not in header.entries]:
            yield f"the strategy has it on rank {rank}, the file does not: {', '.join(absent)}"
        if unknown := [name for name in header.entries if name not in boxes and name not in self.loose]:
            yield f"in the file, but the strategy does not have it on rank {rank}: {', '.join(unknown)}"
        for name, box in boxes.items():
            spec = TensorSpec(box.shape, self.strategy.entries[name].dtype)
            if name in header.entries and (given := header.entries[name].spec) != spec:
                yield f"tensor {name} is {described(given)}, the strategy says {described(spec)}"

    def _changing(self) -> Iterator[str]:
        for name, source in self.loose.items():
            first = bytes(blob_at(mapped(self.paths[source]), self.headers[source], name).data)
            for rank, header in self.headers.items():
                if name in header.entries and bytes(blob_at(mapped(self.paths[rank]), header, name).data) != first:
                    yield f"{self.paths[rank]}: {name} is in no strategy, and differs from that of rank {source}"


def write_held(
    path: Path, dst: Strategy, rank: int, more: Mapping[str, TensorSpec], chunks: Callable[[str], Iterable[memoryview]]
) -> None:
    """A file of all that ``rank`` of ``dst`` holds, copies included, and of ``more``."""
    specs = {name: TensorSpec(box.shape, dst.entries[name].dtype) for name, box in held_boxes(dst, rank).items()}
    write_stream(path, {**specs, **more}, chunks, stamp(rank, dst.grid.size, dst.digest))


def whole_strategy(path: Path, listed: Collection[str]) -> Strategy:
    """Of one full checkpoint: every tensor whole, those that are loose beside a strategy with ``listed`` left out."""
    header, grid = read_header(path), Grid(())
    loose = _loose({0: header}, listed)
    entries = {
        name: Entry(Layout(grid, slot.spec.shape, ((),) * len(slot.spec.shape)), slot.spec.dtype)
        for name, slot in header.entries.items()
        if name not in loose
    }
    return Strategy(grid, entries)


def _loose(headers: Mapping[int, Header], listed: Collection[str]) -> dict[str, int]:
    """By name, the first rank that has it."""
    out: dict[str, int] = {}
    for rank, header in headers.items():
        for name, slot in header.entries.items():
            if name not in listed and prod(slot.spec.shape) == 1:
                out.setdefault(name, rank)
    return out


def held_boxes(strategy: Strategy, rank: int) -> dict[str, Box]:
    out = {}
    for name, entry in strategy.held(rank).items():
        box = entry.layout.box(rank)
        assert box is not None
        out[name] = box
    return out
