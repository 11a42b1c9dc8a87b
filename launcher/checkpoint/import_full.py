"""Full tensors, cut into a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoint.behind import Behind
from launcher.checkpoint.blob import Blob
from launcher.checkpoint.files import sliced
from launcher.checkpoint.fresh import check_destination, fresh
from launcher.checkpoint.gather import gathered, slices
from launcher.checkpoint.store import seal
from launcher.checkpoint.strategy import Entry, Strategy, match
from launcher.checkpoint.transform import PEAK, Report, is_checkpoint
from launcher.checkpoint.window import Window
from launcher.checkpoint.write import write_pieces
from launcher.plan.grid import Grid
from launcher.plan.layout import Box, Layout


def import_full(
    src: Mapping[str, Blob],
    dst: Path,
    target: Strategy,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    key: str | None = None,
) -> Report:
    """Write the tensors of ``src`` as the checkpoint ``dst``, laid out by ``target``.

    ``state`` is what it says of itself, anything JSON can say. ``src`` is ``read_full`` or ``read_hf`` of a file, or
    blobs in memory. A tied tensor may come under any of its names, under several if they are equal. ``key``
    says where the key is to encrypt with. Everything is checked before the first byte is written. Raises as
    ``transform`` does.
    """
    check_destination(dst, overwrite, is_checkpoint, "checkpoint")
    names = _names(src, target)
    tensors = {name: src[theirs] for name, theirs in names.items()}
    window = Window()

    def chunks(name: str, box: Box) -> Iterator[memoryview]:
        blob = tensors[name]
        return gathered(box, blob.dtype, lambda part, out: window.take(blob, slices(part), out))

    with fresh(dst) as new, Behind() as behind:
        records = [write_pieces(new, rank, target, chunks, {}, key, behind) for rank in range(target.grid.size)]
        behind.wait()
        seal(new, records, state)
    files = {path: record for r in records for path, record in r.files.items()}
    read = sum(blob.data.nbytes for blob in tensors.values())
    return Report(dst, len(files), read, sum(f.size for f in files.values()), PEAK)


def _names(src: Mapping[str, Blob], target: Strategy) -> dict[str, str]:
    """For each entry of ``target`` the name in ``src``."""
    given = {n: [a for a in (n, *e.aliases) if a in src] for n, e in target.entries.items()}
    _check_ties(src, given)
    twins = {n for names in given.values() for n in names[1:]}
    grid = Grid(())
    entries = {n: Entry(Layout(grid, b.shape, ((),) * len(b.shape)), b.dtype) for n, b in src.items() if n not in twins}
    return match(Strategy(grid, entries), target)


def _check_ties(src: Mapping[str, Blob], given: Mapping[str, list[str]]) -> None:
    found = []
    for names in given.values():
        for name in names[1:]:
            if not _same(src[names[0]], src[name]):
                found.append(f"{name}: tied to {names[0]} in the destination, but the source has other values for it")
    if found:
        raise ValueError("\n".join(found))


def _same(a: Blob, b: Blob) -> bool:
    if a.spec != b.spec:
        return False
    pairs = zip(sliced(a.data), sliced(b.data), strict=True)
    return all(np.array_equal(np.frombuffer(x, np.uint8), np.frombuffer(y, np.uint8)) for x, y in pairs)
