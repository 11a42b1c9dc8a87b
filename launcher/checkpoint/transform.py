"""Rewrites a checkpoint in another layout, in memory that does not grow with the model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.atomic_folder import check_apart, check_destination, fresh
from launcher.checkpoint.layout.strategy import Strategy, match
from launcher.checkpoint.manifest import NAME
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.store import seal
from launcher.checkpoint.tensorfile.safetensors import CHUNK
from launcher.checkpoint.tensorfile.write_behind import WriteBehind
from launcher.checkpoint.write import RankRecord, RankWriter
from launcher.plan.values.trust import ANYONE, Trust


@dataclass(frozen=True)
class Report:
    """What a function of this package has written.

    ``bytes_read`` counts tensor bytes. ``peak`` is the most bytes kept in memory at once, whatever the size
    of the model. ``left`` are the tensors that were left out, where the caller permitted that.
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

    Parameters, buffers, optimizer states and the state are copied. Random states of single ranks are not:
    they fit one layout only. If the source is encrypted, ``dst`` is encrypted too. Names, shapes and dtypes
    of every file are checked before the first byte is written. ``dst`` appears when it is complete.

    Args:
        src: The checkpoint to read.
        dst: The folder to write.
        target: The layout to write.
        overwrite: Replace a checkpoint at ``dst``.
        key: Where the key to encrypt ``dst`` with is; by default, where the source's key is.
        workers: How many ranks are written at a time. Each has a thread that verifies what is read; one
            thread for all of them syncs what has been written.
        trust: Who must vouch for ``src``.

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
    """Raises ``ValueError`` and ``FileExistsError`` as ``transform`` does, whatever is in ``src``."""
    check_apart(src, dst)
    check_destination(dst, overwrite, is_checkpoint, "checkpoint")


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder has a manifest. The checkpoint may still be damaged."""
    return (folder / NAME).is_file()
