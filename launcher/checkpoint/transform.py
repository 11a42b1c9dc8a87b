"""Transforms a checkpoint from one layout to another, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from math import prod
from pathlib import Path

import numpy as np

from launcher.checkpoint.layout.shards import overlapping_shards, overlaps
from launcher.checkpoint.layout.strategy import Strategy, match
from launcher.checkpoint.manifest import FILE_OF, MANIFEST, rank_file
from launcher.checkpoint.read import Checkpoint, Reader, file_header, open_checkpoint
from launcher.checkpoint.store import check_apart, check_destination, fresh, seal
from launcher.checkpoint.tensorfile.disk import WriteBehind
from launcher.checkpoint.tensorfile.safetensors import CHUNK
from launcher.checkpoint.verify import table
from launcher.checkpoint.write import RankRecord, RankWriter, saved_boxes
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.layout import Box, Layout
from launcher.plan.values.text import bytes_text


@dataclass(frozen=True)
class Report:
    """A summary of what a function of this package has written.

    ``bytes_read`` counts tensor bytes. ``peak`` is the most bytes kept in memory at once, for a model of any
    size. ``left`` are the tensors that were left out, if the caller permitted that.
    """

    path: Path
    files: int
    bytes_read: int
    bytes_written: int
    peak: int
    left: tuple[str, ...] = ()


PEAK = 5 * CHUNK
"""Bytes that a worker keeps in memory: its buffer, and the source ranges mapped to read and to verify."""


def transform(
    src: Path,
    dst: Path,
    target: Strategy,
    *,
    overwrite: bool = False,
    key: str | None = None,
    workers: int = 1,
    trust: Trust = ANYONE,
) -> Report:
    """Writes the checkpoint ``src`` to ``dst`` in the layout ``target``.

    Parameters, buffers, optimizer states and the state are copied. Random states of single ranks are not
    copied: they fit one layout only. If the source is encrypted, ``dst`` is encrypted too. Names, shapes and
    dtypes of every file are checked before the first byte is written. ``dst`` appears when it is complete.

    Args:
        src: The checkpoint to read.
        dst: The folder to write.
        target: The layout to write.
        overwrite: Replace a checkpoint at ``dst``.
        key: The place of the key to encrypt ``dst`` with; by default, the place of the source's key.
        workers: How many ranks are written at a time. Each has a thread that verifies what is read; one
            thread for all of them syncs what has been written.
        trust: Says which key the MAC of ``src`` must be made with.

    Raises:
        ValueError: The source is incomplete, damaged or has other tensors than ``target``.
        FileExistsError: The destination is not empty.
    """
    check_places(src, dst, overwrite)
    reader = Reader(open_checkpoint(src, trust))
    names = match(reader.checkpoint.strategy, target)
    reader.check_headers()
    key = key or reader.checkpoint.place

    with fresh(dst) as new, WriteBehind() as behind:

        def write(rank: int) -> tuple[RankRecord, int]:
            with ThreadPoolExecutor(1) as helper:
                own = reader.beside(helper)
                writer = RankWriter(new, rank, target, key=key, behind=behind)
                record = writer.write(lambda name, box: own.chunks(names[name], box))
            return record, own.bytes_read

        # threads suffice: all slow work (copies, digests, writes, syncs) releases the interpreter lock
        with ThreadPoolExecutor(workers) as pool:
            done = list(pool.map(write, range(target.grid.size)))
        behind.wait()
        records = [record for record, _ in done]
        seal(new, records, reader.checkpoint.state)

    files = {path: record for r in records for path, record in r.files.items()}
    read = sum(nbytes for _, nbytes in done)
    written = sum(f.size for f in files.values())
    return Report(dst, len(files), bytes_read=read, bytes_written=written, peak=workers * PEAK)


def check_places(src: Path, dst: Path, overwrite: bool) -> None:
    """Raises ``ValueError`` and ``FileExistsError`` as ``transform`` does; it does not read ``src``."""
    check_apart(src, dst)
    check_destination(dst, overwrite, is_checkpoint, "checkpoint")


def is_checkpoint(folder: Path) -> bool:
    """Returns true if the folder has a manifest. The checkpoint may still be damaged."""
    return (folder / MANIFEST).is_file()


@dataclass(frozen=True)
class Source:
    """The part of one source file that ``rank`` of the destination reads.

    ``file`` is a path within the source's folder; ``tensors`` is how many tensors are read from it.
    """

    rank: int
    file: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Span:
    """``nbytes`` of the source's tensor ``name``, all between bytes ``start`` and ``stop`` of ``file``."""

    file: str
    name: str
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class TransformPlan:
    """The reads and writes of a transform.

    ``nbytes`` are read and written; verifying reads the source once more. ``peak`` is the most bytes kept in
    memory at once. ``sources`` are ordered by rank, then by file; ``names`` maps each name in the destination
    to the name in the source.
    """

    checkpoint: Checkpoint
    target: Strategy
    names: Mapping[str, str]
    sources: tuple[Source, ...]
    nbytes: int
    peak: int

    def spans(self, rank: int) -> Iterator[Span]:
        """Yields the bytes that ``rank`` of the destination reads, one span per tensor and file."""
        header = lru_cache(maxsize=None)(partial(file_header, self.checkpoint))
        boxes = {n: box for of_file in saved_boxes(self.target, rank).values() for n, box in of_file.items()}
        for name, box in boxes.items():
            source = self.names[name]
            entry = self.checkpoint.strategy.entries[source]
            size = ITEMSIZE[entry.dtype]
            file = FILE_OF[entry.kind]

            # from the first to the last element of each of the source's pieces that is needed
            for piece, both in overlapping_shards(entry.layout, box):
                base = header(piece.rank, file).entries[source].start
                first, last = _ends(both.within(piece.box), piece.box.shape)
                yield Span(
                    file=rank_file(piece.rank, file),
                    name=source,
                    start=base + first * size,
                    stop=base + (last + 1) * size,
                    nbytes=prod(both.shape) * size,
                )

    def text(self, limit: int = 50) -> str:
        """Returns a readable summary; its table has at most ``limit`` rows."""
        before = _counted(self.checkpoint.strategy.grid.size, "rank")
        after = _counted(self.target.grid.size, "rank")
        size, peak = bytes_text(self.nbytes), bytes_text(self.peak)
        head = (
            f"{self.checkpoint.folder}: {before} -> {after}, {_counted(len(self.names), 'tensor')}\n"
            f"{size} to read and to write, at most {peak} in memory at once\n"
        )
        rows = [[str(s.rank), s.file, str(s.tensors), str(s.nbytes)] for s in self.sources[:limit]]
        more = len(self.sources) - len(rows)
        rest = f"and {_counted(more, 'row')} more\n" if more else ""
        return head + table(["rank", "reads", "tensors", "bytes"], rows, right=[0, 2, 3]) + "\n" + rest

    def detail(self, limit: int = 50) -> str:
        """Returns a table of every rank's ``spans``, at most ``limit`` rows."""
        every = ((rank, span) for rank in range(self.target.grid.size) for span in self.spans(rank))
        rows = [
            [str(rank), s.file, s.name, str(s.start), str(s.stop), str(s.nbytes)]
            for rank, s in islice(every, limit)
        ]
        rest = "and more\n" if next(every, None) is not None else ""
        head = ["rank", "reads", "tensor", "from byte", "to", "bytes"]
        return table(head, rows, right=[0, 3, 4, 5]) + "\n" + rest


def plan_transform(src: Path, target: Strategy, *, workers: int = 1, trust: Trust = ANYONE) -> TransformPlan:
    """Returns what ``transform`` to ``target`` will read and write.

    It checks the source, and raises, as ``transform`` does.
    """
    checkpoint = open_checkpoint(src, trust)
    names = match(checkpoint.strategy, target)
    Reader(checkpoint).check_headers()
    source_files = sources(checkpoint.strategy, target, names)
    nbytes = sum(source.nbytes for source in source_files)
    return TransformPlan(checkpoint, target, names, sources=source_files, nbytes=nbytes, peak=workers * PEAK)


def sources(src: Strategy, dst: Strategy, names: Mapping[str, str]) -> tuple[Source, ...]:
    """Returns what each rank of ``dst`` reads from each file of ``src``, ordered by rank.

    It reads only the strategies. Tensors with equal layouts on both sides are computed once.
    """
    count: Counter[tuple[Layout, Layout, str]] = Counter()
    width: Counter[tuple[Layout, Layout, str]] = Counter()
    for name, theirs in names.items():
        entry = src.entries[theirs]
        alike = (entry.layout, dst.entries[name].layout, FILE_OF[entry.kind])
        count[alike] += 1
        width[alike] += ITEMSIZE[entry.dtype]

    out = []
    for file in dict.fromkeys(FILE_OF.values()):
        groups = [(*alike[:2], count[alike], width[alike]) for alike in count if alike[2] == file]
        if groups:
            out += _summed(src.grid.size, groups, file)
    return tuple(sorted(out, key=lambda s: s.rank))


def _summed(world: int, groups: list[tuple[Layout, Layout, int, int]], file: str) -> list[Source]:
    """Returns the sources of one kind of ``file``, summed over ``groups`` of tensors.

    A group is the source layout, the destination layout, how many tensors have both, and the sum of the sizes
    in bytes of one element of each. ``world`` is the number of the source's ranks.
    """
    pairs = [overlaps(a, b) for a, b, _, _ in groups]
    keys = np.concatenate([p.dst * world + p.src for p in pairs])
    sizes = np.concatenate([p.elements * width for p, (_, _, _, width) in zip(pairs, groups, strict=True)])
    counts = np.concatenate([np.full(len(p.src), n) for p, (_, _, n, _) in zip(pairs, groups, strict=True)])

    # sum for each pair of a source and a destination rank
    some, inverse = np.unique(keys, return_inverse=True)
    nbytes = np.zeros_like(some)
    tensors = np.zeros_like(some)
    np.add.at(nbytes, inverse, sizes)
    np.add.at(tensors, inverse, counts)
    rows = zip(some.tolist(), tensors.tolist(), nbytes.tolist(), strict=True)
    return [Source(key // world, rank_file(key % world, file), n, size) for key, n, size in rows]


def _ends(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the row-major positions of the first and last element of ``box`` in a tensor of ``shape``."""
    first = last = 0
    for lo, hi, n in zip(box.lo, box.hi, shape, strict=True):
        first, last = first * n + lo, last * n + hi - 1
    return first, last


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
