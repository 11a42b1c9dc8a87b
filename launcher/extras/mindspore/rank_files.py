"""Checkpoints with one file per rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from launcher.checkpoint.box_bytes import Fill, box_index, stream_box
from launcher.checkpoint.layout.shards import SavedShard, full_box, overlapping_shards
from launcher.checkpoint.layout.strategy import STAGE, Entry, Strategy
from launcher.checkpoint.manifest import stamp
from launcher.checkpoint.tensorfile.disk import WriteBehind
from launcher.checkpoint.tensorfile.mmap_window import Window, strides
from launcher.checkpoint.tensorfile.safetensors import (
    CHUNK,
    blob_at,
    described,
    mapped,
    read_header,
    sliced,
    write_stream,
)
from launcher.extras.mindspore.ckpt import TEXT, Ckpt, open_ckpt, text_bytes, write_ckpt
from launcher.extras.mindspore.encryption import CipherMode
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout
from launcher.plan.values.tensor_spec import TensorSpec

SUFFIXES = (".safetensors", ".ckpt")


class RankSource(Protocol):
    """One rank's file. ``specs`` lists every tensor, ``texts`` the strings that were saved among them."""

    @property
    def path(self) -> Path: ...
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def texts(self) -> Mapping[str, str]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...

    def fill(self, window: Window, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        """Copies ``part`` of the tensor into ``out``, an array of the form that ``words`` returns."""

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """Yields all bytes of the tensor, in order."""


def open_source(
    path: Path, key: bytes | None = None, mode: CipherMode = "AES-GCM", *, verify: bool = True
) -> RankSource:
    """Opens a file and reads its header; with ``verify`` also checks a ``.ckpt``'s checksum, if it has one.

    The checksum requires reading the entire file. ``key`` and ``mode`` decrypt a ``.ckpt``. Raises
    ``ValueError``.
    """
    if path.suffix == ".ckpt":
        return _Ckpt(open_ckpt(path, key, mode, verify=verify))
    return _Safetensors(path)


class _Safetensors:
    texts: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = read_header(path)
        self.specs = {name: slot.spec for name, slot in self._header.entries.items()}
        self.metadata = self._header.metadata

    def fill(self, window: Window, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        window.copy(self.path, self._header.entries[name], box_index(part), out)

    def chunks(self, name: str) -> Iterator[memoryview]:
        return sliced(blob_at(mapped(self.path), self._header, name).data)


class _Ckpt:
    metadata: Mapping[str, str] = {}

    def __init__(self, file: Ckpt) -> None:
        self.path = file.path
        self._file = file
        self.specs = {name: stored.spec for name, stored in file.entries.items() if stored.spec.dtype != TEXT}
        self.texts = {
            name: file.text(name) for name, stored in file.entries.items() if stored.spec.dtype == TEXT
        }
        unknown = sorted({s.dtype for s in self.specs.values()} - ITEMSIZE.keys())
        if unknown:
            raise ValueError(
                f"{self.path}: tensors of dtype {', '.join(unknown)}, which other formats cannot store"
            )

    def fill(self, window: Window, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        slot = self._file.slot(name)
        if slot is not None:
            window.copy(self.path, slot, box_index(part), out)
        else:
            self._gather(name, part, out)

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        return self._file.chunks(name)

    def _gather(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        """Copies ``part`` of a tensor that is encrypted or stored in pieces into ``out``.

        It reads the byte range that contains ``part``; if the range is long, it splits ``part`` in halves.
        """
        if part.empty:
            return

        # the byte range from the first element of the part to its last
        spec = self.specs[name]
        size = ITEMSIZE[spec.dtype]
        steps = strides(spec.shape, size)
        start = sum(lo * step for lo, step in zip(part.lo, steps, strict=True))
        span = sum((n - 1) * step for n, step in zip(part.shape, steps, strict=True)) + size
        dim = next((d for d, n in enumerate(part.shape) if n > 1), None)
        if span <= CHUNK or dim is None:
            data = self._file.read(name, start, start + span)
            out[...] = np.ndarray(part.shape, f"u{size}", data, strides=steps)
            return

        half = part.lo[dim] + part.shape[dim] // 2
        below = Box(part.lo, (*part.hi[:dim], half, *part.hi[dim + 1 :]))
        above = Box((*part.lo[:dim], half, *part.lo[dim + 1 :]), part.hi)
        for piece in (below, above):
            self._gather(name, piece, out[box_index(piece.within(part))])


_RANK = re.compile(r"rank_(0|[1-9]\d*)")
_STEP = re.compile(r"(?:(\d+)_)?(\d+)$")
_EPOCH_AND_STEP = re.compile(r"-\d+_\d+$")


def rank_paths(folder: Path) -> dict[int, Path]:
    """Returns the file of each ``rank_<k>`` folder in ``folder``, by rank: the one of the highest step.

    All must be safetensors files, or all ``.ckpt`` files. Raises ``NotADirectoryError``, or ``ValueError``
    for two formats, no ranks, a rank without a file, files that cannot be ordered, or different steps.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}: not a folder")
    matches = ((_RANK.fullmatch(path.name), path) for path in folder.iterdir())
    homes = {int(match[1]): path for match, path in matches if match is not None and path.is_dir()}
    if not homes:
        raise ValueError(f"{folder}: it has no rank_<k> folders")

    # one file per rank, all of one format
    files = {rank: newest(homes[rank]) for rank in sorted(homes)}
    first = next(iter(files.values()))
    other = [path for path in files.values() if path.suffix != first.suffix]
    if other:
        raise ValueError(f"{first} and {other[0]}: two formats in one source; give files of one format")
    _check_one_step(files)
    return files


def _check_one_step(files: Mapping[int, Path]) -> None:
    """Raises ``ValueError`` if the files of the ranks are of different steps: they do not form one model.

    A training that is killed while its ranks save leaves such files. The first number at the end of a name
    may also be the rank. If each rank has only one file, a number counts as a step only in MindSpore's own
    form, ``net-1_20``.
    """
    steps = {rank: _step(path) for rank, path in files.items()}
    several = any(sum(p.suffix == path.suffix for p in path.parent.iterdir()) > 1 for path in files.values())
    if not several and not all(_EPOCH_AND_STEP.search(path.stem) for path in files.values()):
        return
    if all(len(step) > 1 and step[0] == rank for rank, step in steps.items()):
        steps = {rank: step[1:] for rank, step in steps.items()}
    first = next(iter(files))
    other = next((rank for rank, step in steps.items() if step != steps[first]), None)
    if other is not None:
        text = f"{files[first]} and {files[other]}: files of different steps do not form one model"
        raise ValueError(f"{text}; keep in each folder the file of one step that all ranks have")


def newest(home: Path) -> Path:
    """Returns the newest file of a rank's folder: ``net-10_5`` is newer than ``net-9_7``.

    A file name ends in the numbers of epoch and step, or in the step alone. Raises ``ValueError``.
    """
    # regular files only: opening a pipe would block
    files = sorted(path for path in home.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise ValueError(f"{home}: no .safetensors or .ckpt file in it")
    other = [path for path in files if path.suffix != files[0].suffix]
    if other:
        raise ValueError(
            f"{files[0]} and {other[0].name}: two formats in one folder; keep files of one format"
        )
    if len(files) == 1:
        return files[0]

    # the highest step, if all names have the same form
    steps = {path: _step(path) for path in files}
    best = max(steps.values(), default=())
    newest_files = [path for path, step in steps.items() if step == best]
    if len({*map(len, steps.values())}) > 1 or not best or len(newest_files) > 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{home}: no newest file: {names} do not end in different steps; keep one")
    return newest_files[0]


def _step(path: Path) -> tuple[int, ...]:
    match = _STEP.search(path.stem)
    return () if match is None else tuple(int(n) for n in match.groups() if n is not None)


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
    """Returns the reads from which ``rank`` of ``dst`` is assembled; they use few source ranks.

    A replicated piece is read from a rank that is read anyway, else from the lowest rank that has it.
    ``names`` is the result of ``match``. ``among``, if given, are the source ranks whose files exist. Raises
    ``ValueError`` if none of them has a piece that is needed.
    """
    pieces = _needed_pieces(src, dst, names, rank)
    holders = [_holders(src.entries[names[name]].layout, piece.rank, among) for name, piece, _ in pieces]
    lost = sorted({piece.rank for (_, piece, _), ranks in zip(pieces, holders, strict=True) if not ranks})
    if lost:
        raise ValueError(
            f"rank {', '.join(map(str, lost))} is missing; rank {rank} of the destination needs it"
        )

    # pieces with the fewest holders first: they leave the least choice
    chosen: set[int] = set()
    out: dict[int, Take] = {}
    for i in sorted(range(len(pieces)), key=lambda i: len(holders[i])):
        name, piece, both = pieces[i]
        source = next((r for r in holders[i] if r in chosen), holders[i][0])
        chosen.add(source)
        out[i] = Take(name, source, piece.box, both)
    return tuple(out[i] for i in sorted(out))


def _needed_pieces(
    src: Strategy, dst: Strategy, names: Mapping[str, str], rank: int
) -> list[tuple[str, SavedShard, Box]]:
    out = []
    for name, entry in dst.entries_of(rank).items():
        box = entry.layout.box(rank)
        assert box is not None
        layout = src.entries[names[name]].layout
        out += [(name, piece, both) for piece, both in overlapping_shards(layout, box)]
    return out


def _holders(layout: Layout, lowest: int, among: Collection[int] | None) -> tuple[int, ...]:
    """Returns the ranks that have the same piece, from ``lowest`` on, in ascending order."""
    where = layout.grid.coords(lowest)
    pinned = dict(layout.at)
    free = {axis: pinned.get(axis, range(n)) for axis, n in layout.grid.axes if axis not in layout.axes}
    places = (dict(zip(free, at, strict=True)) for at in product(*free.values()))
    ranks = sorted(layout.grid.rank(**where | place) for place in places)
    return tuple(ranks) if among is None else tuple(r for r in ranks if r in among)


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
    """The files of some or all ranks, checked against the strategy that they were saved with.

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
            verify: Check that all copies of a piece have the same bytes.
        """
        self.files = files
        self.strategy = strategy
        self._own = own
        self.loose = loose({rank: file.specs for rank, file in files.items()}, {*strategy.named, *known})
        self.texts = {name: text for file in files.values() for name, text in file.texts.items()}
        flaws = [f"{files[rank].path}: {flaw}" for rank in files for flaw in self._flaws(rank)]
        same = {name: next(r for r in files if name in files[r].specs) for name in replicated if verify}
        flaws = flaws or [*self._changing({**self.loose, **same})]
        if verify:
            flaws = flaws or [*self._differing_copies({*replicated})]
        if flaws:
            raise ValueError("\n".join(flaws))

    def tensors_of(self, dst: Strategy, names: Mapping[str, str], rank: int) -> HeldTensors:
        """Returns the tensors that ``write`` writes, to be read a region at a time."""
        # which file each region is read from
        chosen: dict[str, list[Take]] = {name: [] for name in dst.entries_of(rank)}
        for take in takes(self.strategy, dst, names, rank, among=self.files):
            chosen[take.name].append(take)

        specs = {
            name: TensorSpec(box.shape, dst.entries[name].dtype)
            for name, box in held_boxes(dst, rank).items()
        }
        specs |= {name: self.files[source].specs[name] for name, source in self.loose.items()}

        # loose tensors are equal in every file that has them
        window = Window()
        fills = {name: self._fill(window, names[name], pieces) for name, pieces in chosen.items()}
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

        ``names`` is the result of ``match``.
        """
        tensors = self.tensors_of(dst, names, rank)
        boxes = held_boxes(dst, rank)

        def chunks(name: str) -> Iterator[memoryview]:
            spec = tensors.specs[name]
            return stream_box(boxes.get(name, full_box(spec.shape)), spec.dtype, partial(tensors.fill, name))

        specs = {name: tensors.specs[name] for name in self.loose}
        write_held(path, dst, rank, chunks, more=specs, texts=self.texts, behind=behind)

    def _fill(self, window: Window, name: str, chosen: list[Take]) -> Fill:
        def fill(part: Box, out: npt.NDArray[Any]) -> None:
            for take in chosen:
                both = take.box & part
                if both is None:
                    continue
                here = out[box_index(both.within(part))]
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
            actual = file.metadata.get(f"launcher.{key}")
            if actual not in values:
                expected_mark = mark[f"launcher.{key}"]
                yield f"a file of another rank or layout: it says {key} {actual}, not {expected_mark}"

        # its tensors must be those of the strategy
        absent = [name for name in boxes if name not in file.specs]
        if absent:
            yield f"not in the file, but on rank {rank} in the strategy: {', '.join(absent)}"
        unknown = [name for name in file.specs if name not in boxes and name not in self.loose]
        if unknown:
            yield f"in the file, but not on rank {rank} in the strategy: {', '.join(unknown)}"
        for name, box in boxes.items():
            expected = TensorSpec(box.shape, self.strategy.entries[name].dtype)
            actual_spec = file.specs.get(name, expected)
            if actual_spec != expected:
                yield f"tensor {name} is {described(actual_spec)}, the strategy says {described(expected)}"

    def _changing(self, same: Mapping[str, int]) -> Iterator[str]:
        for name, source in same.items():
            first = _digest(self.files[source], name)
            for rank, file in self.files.items():
                if rank != source and name in file.specs and _digest(file, name) != first:
                    text = f"{name} is in no strategy, and differs from its value on rank {source}"
                    yield f"{file.path}: {text}; {self._way_out(name, source)}"
        for file in self.files.values():
            for name, text in file.texts.items():
                if text != self.texts[name]:
                    yield f"{file.path}: the string {name} differs from its value on another rank"

    def _differing_copies(self, replicated: Collection[str]) -> Iterator[str]:
        """Yields a message for each tensor that differs in two files, although they have copies of it.

        Buffers are left out: each data-parallel rank may have its own statistics; those of the first rank are
        used.
        """
        first: dict[tuple[str, Box], tuple[int, bytes]] = {}
        copied = _copied(self.strategy, self.files)
        uncompared = {name for name, entry in self.strategy.entries.items() if entry.kind == "buffer"}
        uncompared |= {name for name in self.strategy.entries if _is_statistic(name)} | {*replicated}
        for rank, file in self.files.items():
            for name, box in held_boxes(self.strategy, rank).items():
                if (name, box) not in copied or name in uncompared:
                    continue
                digest = _digest(file, name)
                source, expected = first.setdefault((name, box), (rank, digest))
                if digest != expected:
                    text = f"{name} differs from rank {source}, though both are copies in the strategy"
                    yield f"{file.path}: {text}; give files of one save, and their own strategy"

    def _way_out(self, name: str, source: int) -> str:
        """Returns what the user can do about a tensor that differs from that of rank ``source``."""
        boxes = held_boxes(self.strategy, source)
        if all(boxes.get(n) == full_box(e.layout.shape) for n, e in self.strategy.entries.items()):
            return (
                f"to use the value of rank {source}, give {self.files[source].path} alone, without a strategy"
            )
        if not _is_statistic(name):
            return f"give files of one save, and {LISTS_IT}"
        return f"to use the value of any rank, give {LISTS_IT}"


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
    metadata of a safetensors file. The file is synced to disk on return, unless ``behind`` is given: it syncs
    a safetensors file later. ``chunks`` returns the bytes of a tensor.
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


def strategy_of_one_file(file: RankSource, listed: Collection[str]) -> Strategy:
    """Returns the strategy of one full checkpoint, without single-element tensors that are not ``listed``."""
    grid = Grid(())
    apart = loose({0: file.specs}, listed)
    entries = {
        name: Entry(Layout(grid, spec.shape, ((),) * len(spec.shape)), spec.dtype)
        for name, spec in file.specs.items()
        if name not in apart
    }
    return Strategy(grid, entries)


def full_copy(why: str, files: Mapping[int, RankSource], *, verify: bool) -> RankSource:
    """Returns the file of rank 0 after checking that the files of all other ranks are copies of it.

    Raises ``ValueError``, which begins with ``why`` and names the first tensor that is missing on a rank or
    differs there. Unless ``verify``, only the values of small tensors are compared.
    """
    if 0 not in files:
        raise ValueError(f"{why}: then rank 0 must have a full checkpoint, but there is no folder rank_0")
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
                f"{why}: then all ranks must have the same full checkpoint, but {unlike[0]}{more} of rank "
                f"{rank} differs from rank 0; give the strategy file that they were saved with, or "
                f"{first.path} alone"
            )
    return first


def _small(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Returns the names of the smallest tensors, at most 1 MiB in total."""
    names = sorted(specs, key=lambda name: specs[name].nbytes)
    totals = accumulate(specs[name].nbytes for name in names)
    return [name for name, total in zip(names, totals, strict=True) if total <= 1 << 20]


LISTS_IT = "a strategy that lists it, saved with only_trainable_params=False"
# MindSpore's strategies do not mark buffers; these are its and torch's names of running statistics
STATISTICS = ("moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked")


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in STATISTICS


def _copied(strategy: Strategy, ranks: Iterable[int]) -> set[tuple[str, Box]]:
    """Returns the pieces, by name and box, that several of ``ranks`` hold."""
    counts = Counter(piece for rank in ranks for piece in held_boxes(strategy, rank).items())
    return {piece for piece, count in counts.items() if count > 1}


def _digest(file: RankSource, name: str) -> bytes:
    digest = xxhash.xxh3_128()
    for chunk in file.chunks(name):
        digest.update(chunk)
    return digest.digest()


def unlisted(
    files: Mapping[int, Mapping[str, TensorSpec]], strategy: Strategy, known: Collection[str]
) -> dict[str, Entry]:
    """Returns entries for tensors that ``strategy`` leaves out, as a strategy of trainable parameters does.

    A tensor gets an entry if all ranks of its stages have it in one shape and dtype: if the values agree too,
    these are full copies. A tensor of a single element gets an entry only if it is in ``known``.
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
    for name, entry in strategy.entries_of(rank).items():
        box = entry.layout.box(rank)
        assert box is not None
        out[name] = box
    return out
