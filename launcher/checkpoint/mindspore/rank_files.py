"""Rank files: one plain file per rank with all tensors that the rank holds, without manifest or digests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy.typing as npt
import xxhash

from launcher.checkpoint.chunked import Fill, gathered, slices
from launcher.checkpoint.layout.shards import whole
from launcher.checkpoint.layout.strategy import STAGE, Entry, Strategy
from launcher.checkpoint.manifest import stamp
from launcher.checkpoint.mindspore.formats import text_bytes, write_ckpt
from launcher.checkpoint.mindspore.formats.dtypes import TEXT
from launcher.checkpoint.mindspore.rank_source import RankSource
from launcher.checkpoint.mindspore.source_ranks import Take, takes
from launcher.checkpoint.tensorfile.blob import described
from launcher.checkpoint.tensorfile.mmap_window import Window
from launcher.checkpoint.tensorfile.safetensors import write_stream
from launcher.checkpoint.tensorfile.write_behind import WriteBehind
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout


@dataclass(frozen=True)
class HeldTensors:
    """The tensors of one rank, assembled from the files of several.

    Boxes are in indices of the full tensors.
    """

    specs: Mapping[str, TensorSpec]
    fills: Mapping[str, Fill]

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        self.fills[name](part, out)


class RankFiles:
    """The files of some or all ranks, which fit the strategy that they were saved with.

    ``loose`` are tensors of a single element that no strategy lists, such as step counters. They are equal on
    all ranks that have them.
    """

    def __init__(
        self,
        files: Mapping[int, RankSource],
        strategy: Strategy,
        known: Collection[str],
        *,
        own: bool,
        replicated: Collection[str] = (),
        verify: bool = True,
    ) -> None:
        """Checks the files. Raises ``ValueError`` with every flaw of every file.

        Args:
            files: The files by rank.
            strategy: Their layout.
            known: Names that are never loose.
            own: False if ``strategy`` was derived from the files themselves.
            replicated: Entries of ``strategy`` that its file does not list.
            verify: Check that every rank has the same bytes of ``replicated`` entries.
        """
        self.files = files
        self.strategy = strategy
        self._own = own
        self.loose = loose({rank: file.specs for rank, file in files.items()}, {*strategy.named, *known})
        self.texts = {name: text for file in files.values() for name, text in file.texts.items()}
        found = [f"{files[rank].path}: {flaw}" for rank in files for flaw in self._flaws(rank)]
        same = {name: next(r for r in files if name in files[r].specs) for name in replicated if verify}
        found = found or [*self._changing({**self.loose, **same})]
        if found:
            raise ValueError("\n".join(found))

    def held(self, dst: Strategy, names: Mapping[str, str], rank: int) -> HeldTensors:
        """Returns the tensors that ``write`` writes, to be read a region at a time."""
        # which file each region is read from
        chosen: dict[str, list[Take]] = {name: [] for name in dst.held(rank)}
        for take in takes(self.strategy, dst, names, rank, among=self.files):
            chosen[take.name].append(take)

        specs = {
            name: TensorSpec(box.shape, dst.entries[name].dtype)
            for name, box in held_boxes(dst, rank).items()
        }
        specs |= {name: self.files[source].specs[name] for name, source in self.loose.items()}

        # loose tensors are equal in every file that has them
        window = Window()
        fills = {name: self._fill(window, names[name], found) for name, found in chosen.items()}
        fills |= {name: partial(self.files[source].fill, window, name) for name, source in self.loose.items()}
        return HeldTensors(specs, fills)

    def write(
        self,
        dst: Strategy,
        names: Mapping[str, str],
        rank: int,
        path: Path,
        behind: WriteBehind | None = None,
    ) -> None:
        """Writes all tensors that ``rank`` of ``dst`` holds, and the loose ones, to ``path``.

        ``names`` is what ``match`` returns.
        """
        held = self.held(dst, names, rank)
        boxes = held_boxes(dst, rank)

        def chunks(name: str) -> Iterator[memoryview]:
            spec = held.specs[name]
            return gathered(boxes.get(name, whole(spec.shape)), spec.dtype, partial(held.fill, name))

        specs = {name: held.specs[name] for name in self.loose}
        write_held(path, dst, rank, chunks, more=specs, texts=self.texts, behind=behind)

    def _fill(self, window: Window, name: str, chosen: list[Take]) -> Fill:
        def fill(part: Box, out: npt.NDArray[Any]) -> None:
            for take in chosen:
                both = take.box & part
                if both is None:
                    continue
                here = out[slices(both.within(part))]
                self.files[take.rank].fill(window, name, both.within(take.piece), here)

        return fill

    def _flaws(self, rank: int) -> Iterator[str]:
        file = self.files[rank]
        boxes = held_boxes(self.strategy, rank)

        # the metadata, where it exists, must name this rank, world and strategy
        mark = stamp(rank, self.strategy.grid.size, self.strategy.meaning)
        good = {key: [None, mark[f"launcher.{key}"]] for key in ("rank", "world")}
        if self._own:
            good["strategy"] = [None, self.strategy.meaning, self.strategy.digest]
        for key, values in good.items():
            found = file.metadata.get(f"launcher.{key}")
            if found not in values:
                yield f"a file from another place: it says {key} {found}, not {mark[f'launcher.{key}']}"

        # its tensors must be those of the strategy
        absent = [name for name in boxes if name not in file.specs]
        if absent:
            yield f"the strategy has it on rank {rank}, the file does not: {', '.join(absent)}"
        unknown = [name for name in file.specs if name not in boxes and name not in self.loose]
        if unknown:
            yield f"in the file, but the strategy does not have it on rank {rank}: {', '.join(unknown)}"
        for name, box in boxes.items():
            want = TensorSpec(box.shape, self.strategy.entries[name].dtype)
            has = file.specs.get(name, want)
            if has != want:
                yield f"tensor {name} is {described(has)}, the strategy says {described(want)}"

    def _changing(self, same: Mapping[str, int]) -> Iterator[str]:
        for name, source in same.items():
            first = _digest(self.files[source], name)
            for rank, file in self.files.items():
                if rank != source and name in file.specs and _digest(file, name) != first:
                    text = f"{name} is in no strategy, and differs from that of rank {source}"
                    yield f"{file.path}: {text}; {self._any_of(source)}"
        for file in self.files.values():
            for name, text in file.texts.items():
                if text != self.texts[name]:
                    yield f"{file.path}: the string {name} differs from that of another rank"

    def _any_of(self, source: int) -> str:
        """How to go on with tensors that differ between ranks, if those of ``source`` will do."""
        boxes = held_boxes(self.strategy, source)
        if all(boxes.get(n) == whole(e.layout.shape) for n, e in self.strategy.entries.items()):
            return f"to take that of rank {source}, give {self.files[source].path} alone, without a strategy"
        return (
            "to take that of any rank, give a strategy that lists it, saved with only_trainable_params=False"
        )


def write_held(
    path: Path,
    dst: Strategy,
    rank: int,
    chunks: Callable[[str], Iterable[bytes | memoryview]],
    *,
    more: Mapping[str, TensorSpec] | None = None,
    texts: Mapping[str, str] | None = None,
    behind: WriteBehind | None = None,
) -> None:
    """Writes a file of all tensors that ``rank`` of ``dst`` holds, replicas included, and of ``more``.

    The suffix of ``path`` gives the format. The strings ``texts`` are entries of a ``.ckpt`` file, or
    metadata of a safetensors file. The file is synced to disk on return; a safetensors file with ``behind``
    is synced when that has done its work. ``chunks`` returns the bytes of a tensor.
    """
    strings = texts or {}
    specs = {
        name: TensorSpec(box.shape, dst.entries[name].dtype) for name, box in held_boxes(dst, rank).items()
    }
    specs |= more or {}
    if path.suffix == ".ckpt":
        specs |= {name: TensorSpec((len(text),), TEXT) for name, text in strings.items()}

        def contents(name: str) -> Iterable[bytes | memoryview]:
            return [text_bytes(strings[name])] if name in strings else chunks(name)

        write_ckpt(path, specs, contents)
        return

    # by meaning, because the strategy may be given in another format when the file is read
    mark = stamp(rank, dst.grid.size, dst.meaning)
    write_stream(path, specs, _views(chunks), {**strings, **mark}, digested=False, behind=behind)


def _views(chunks: Callable[[str], Iterable[bytes | memoryview]]) -> Callable[[str], Iterable[memoryview]]:
    return lambda name: (memoryview(chunk) for chunk in chunks(name))


def whole_strategy(file: RankSource, listed: Collection[str]) -> Strategy:
    """Returns the strategy of one full checkpoint; tensors that are loose, given ``listed``, are left out."""
    grid = Grid(())
    apart = loose({0: file.specs}, listed)
    entries = {
        name: Entry(Layout(grid, spec.shape, ((),) * len(spec.shape)), spec.dtype)
        for name, spec in file.specs.items()
        if name not in apart
    }
    return Strategy(grid, entries)


def full_copy(why: str, files: Mapping[int, RankSource], *, verify: bool) -> RankSource:
    """Returns the file of rank 0 after checking that all other ranks have copies, as data-parallel ranks do.

    Raises ``ValueError``, which begins with ``why``, naming the first tensor that is missing on a rank or
    differs there. Unless ``verify``, only the values of small tensors are compared.
    """
    if 0 not in files:
        raise ValueError(f"{why}: rank 0 then has a full checkpoint; there is no folder for it")
    first = files[0]
    for rank, file in files.items():
        names = first.specs.keys() | file.specs.keys()
        unlike = sorted(name for name in names if file.specs.get(name) != first.specs.get(name))
        if not unlike:
            compared = first.specs if verify else _small(first.specs)
            unlike = [name for name in compared if _digest(file, name) != _digest(first, name)]
        if unlike:
            more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
            raise ValueError(
                f"{why}: every rank then has a full checkpoint, but {unlike[0]}{more} of rank {rank} differs "
                f"from rank 0; give the strategy file that they were saved with, or {first.path} alone"
            )
    return first


def _small(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Returns the names of the smallest tensors, at most 1 MiB in total."""
    names = sorted(specs, key=lambda name: specs[name].nbytes)
    totals = accumulate(specs[name].nbytes for name in names)
    return [name for name, total in zip(names, totals, strict=True) if total <= 1 << 20]


def _digest(file: RankSource, name: str) -> bytes:
    digest = xxhash.xxh3_128()
    for chunk in file.chunks(name):
        digest.update(chunk)
    return digest.digest()


def unlisted(
    files: Mapping[int, Mapping[str, TensorSpec]], strategy: Strategy, known: Collection[str]
) -> dict[str, Entry]:
    """Returns entries for tensors that ``strategy`` leaves out, as a strategy of trainable parameters does.

    A tensor gets an entry if it has one shape on every rank of some stages: these are full copies, if their
    values agree. A tensor of a single element gets one only if it is in ``known``.
    """
    count = strategy.stages
    grid = strategy.grid
    apart = loose(files, known)
    ranks: dict[str, list[int]] = {}
    for rank, specs in files.items():
        for name in specs.keys() - strategy.named.keys() - apart.keys():
            ranks.setdefault(name, []).append(rank)

    stage_of = {rank: grid.coords(rank).get(STAGE, 0) for rank in files if 0 <= rank < grid.size}
    entries = {}
    for name in sorted(ranks):
        has = ranks[name]
        spec = files[has[0]][name]
        at = tuple(sorted({stage_of[rank] for rank in has if rank in stage_of}))
        all_ranks = {rank for rank, stage in stage_of.items() if stage in at} == {*has}
        if all_ranks and all(files[rank][name] == spec for rank in has):
            pinned = ((STAGE, at),) if len(at) < count else ()
            layout = Layout(grid, spec.shape, ((),) * len(spec.shape), pinned)
            entries[name] = Entry(layout, spec.dtype, "buffer")
    return entries


def loose(files: Mapping[int, Mapping[str, TensorSpec]], listed: Collection[str]) -> dict[str, int]:
    """Returns the single-element tensors that are not ``listed``, each with the first rank that has it."""
    out: dict[str, int] = {}
    for rank, specs in files.items():
        for name, spec in specs.items():
            if name not in listed and prod(spec.shape) == 1:
                out.setdefault(name, rank)
    return out


def held_boxes(strategy: Strategy, rank: int) -> dict[str, Box]:
    """Returns the box of each tensor that ``rank`` holds, by name."""
    out = {}
    for name, entry in strategy.held(rank).items():
        box = entry.layout.box(rank)
        assert box is not None
        out[name] = box
    return out
