"""Writes full tensors as a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from launcher.checkpoint.atomic_folder import check_destination, fresh
from launcher.checkpoint.chunked import gathered
from launcher.checkpoint.full_tensors import Blobs, FullTensors, chunks
from launcher.checkpoint.layout.strategy import Entry, Strategy, match
from launcher.checkpoint.store import seal
from launcher.checkpoint.tensorfile.blob import Blob
from launcher.checkpoint.tensorfile.write_behind import WriteBehind
from launcher.checkpoint.transform import PEAK, Report, is_checkpoint
from launcher.checkpoint.write import RankRecord, RankWriter
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout


def import_full(
    src: Mapping[str, Blob],
    dst: Path,
    target: Strategy,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    key: str | None = None,
) -> Report:
    """Writes the tensors of ``src`` as the checkpoint ``dst``.

    Everything is checked before the first byte is written. Raises as ``transform`` does.

    Args:
        src: The result of ``read_full`` or ``read_hf``, or blobs in memory. It may have a tied tensor under
            any of its names, or under several if the values are equal.
        dst: The folder to write.
        target: The layout to write.
        state: The checkpoint's state: any value that JSON can represent.
        overwrite: Replace a checkpoint at ``dst``.
        key: Where the key to encrypt ``dst`` with is; ``None`` writes plain files.
    """
    return import_whole(Blobs(src), dst, target, state, overwrite=overwrite, key=key)


def import_whole(
    src: FullTensors,
    dst: Path,
    target: Strategy,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    key: str | None = None,
    beside: Sequence[FullTensors] = (),
) -> Report:
    """Does the same as ``import_full`` for any source; each rank's file is cut directly from its tensors.

    ``beside`` are further objects for the same source, each for one more thread: as many more ranks are
    written at a time.
    """
    check_destination(dst, overwrite, is_checkpoint, "checkpoint")
    specs = src.specs
    names = _names(src, specs, target)
    workers = 1 + len(beside)

    def cut(source: FullTensors, name: str, box: Box) -> Iterator[memoryview]:
        return gathered(box, specs[names[name]].dtype, partial(source.fill, names[name]))

    # a source serves one thread at a time
    free = SimpleQueue[FullTensors]()
    for source in (src, *beside):
        free.put(source)
    with fresh(dst) as new, WriteBehind() as behind:

        def write(rank: int) -> RankRecord:
            source = free.get()
            try:
                return RankWriter(new, rank, target, key=key, behind=behind).write(partial(cut, source))
            finally:
                free.put(source)

        with ThreadPoolExecutor(workers) as pool:
            records = list(pool.map(write, range(target.grid.size)))
        behind.wait()
        seal(new, records, state)

    files = {path: record for r in records for path, record in r.files.items()}
    read = sum(specs[theirs].nbytes for theirs in names.values())
    written = sum(f.size for f in files.values())
    return Report(dst, len(files), bytes_read=read, bytes_written=written, peak=workers * PEAK)


def held(src: FullTensors, target: Strategy, rank: int) -> Iterator[tuple[str, Blob]]:
    """Yields the name and the piece of each tensor that ``rank`` of ``target`` holds, each in its own memory.

    Raises ``ValueError`` as ``import_full`` does.
    """
    specs = src.specs
    names = _names(src, specs, target)
    for name, entry in target.held(rank).items():
        box = entry.layout.box(rank)
        assert box is not None
        spec = specs[names[name]]
        data = bytearray()
        for chunk in gathered(box, spec.dtype, partial(src.fill, names[name])):
            data += chunk
        yield name, Blob.of(spec.dtype, box.shape, data)


def _names(src: FullTensors, specs: Mapping[str, TensorSpec], target: Strategy) -> dict[str, str]:
    """Returns for each entry of ``target`` the name in ``src``."""
    given = {n: [a for a in (n, *e.aliases) if a in specs] for n, e in target.entries.items()}
    if unequal := [*unequal_ties(src, target)]:
        text = "in the destination, but the source has other values for it"
        raise ValueError("\n".join(f"{name}: tied to {first} {text}" for first, name in unequal))
    twins = {n for names in given.values() for n in names[1:]}

    grid = Grid(())
    entries = {
        n: Entry(Layout(grid, s.shape, ((),) * len(s.shape)), s.dtype)
        for n, s in specs.items()
        if n not in twins
    }
    return match(Strategy(grid, entries), target)


def unequal_ties(src: FullTensors, target: Strategy) -> Iterator[tuple[str, str]]:
    """Yields pairs of names of one tensor of ``target`` under which ``src`` has different values.

    Files are read up to the first difference.
    """
    specs = src.specs
    for first, entry in target.entries.items():
        names = [name for name in (first, *entry.aliases) if name in specs]
        for name in names[1:]:
            if specs[names[0]] != specs[name] or not _same(src, names[0], name):
                yield names[0], name


def _same(src: FullTensors, a: str, b: str) -> bool:
    return all(x == y for x, y in zip(chunks(src, a), chunks(src, b), strict=True))
