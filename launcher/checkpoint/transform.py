"""A checkpoint in one layout, written again in another, in memory that does not grow with it."""

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
    """``bytes_read`` counts tensor bytes.

    ``peak`` is the bytes kept in memory at once, whatever the model's size. ``left`` are the tensors that
    were left out, where that was asked for.
    """

    path: Path
    files: int
    bytes_read: int
    bytes_written: int
    peak: int
    left: tuple[str, ...] = ()


PEAK = 5 * CHUNK
"""A worker's: a buffer to gather in, the stretch of source files mapped in, the one being verified."""


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
    """Write the checkpoint ``src`` as ``dst``, laid out by ``target``.

    Parameters, buffers, optimizer states and the state go along; random states of single ranks stay behind,
    they fit one layout only. An encrypted source gives an encrypted ``dst``: ``key`` says where the key is,
    if not where the source's is; ``trust`` says who must vouch for the source.

    Names, shapes and dtypes of every file are checked before the first byte is written; ``workers`` ranks are
    written at a time, each with a thread beside it that verifies what is read, all with one that syncs what
    has been written; ``dst`` appears when complete. Raises ``ValueError`` for a source that is incomplete,
    damaged or of other tensors, ``FileExistsError`` for a destination that is not empty.
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

        # threads: all that takes time (copies, digests, writes, syncs) lets go of the interpreter
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
    """By its manifest alone; it may be damaged."""
    return (folder / NAME).is_file()
