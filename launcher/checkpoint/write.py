"""One rank's files of a checkpoint."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.layout.shards import saved_at_home
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.manifest import EXTRA, FILE_OF, FileRecord, rank_file, stamp
from launcher.checkpoint.tensorfile.blob import Blob, described
from launcher.checkpoint.tensorfile.durable import sync
from launcher.checkpoint.tensorfile.json_file import read_bytes
from launcher.checkpoint.tensorfile.keys import load_key
from launcher.checkpoint.tensorfile.safetensors import Written, sliced, write_stream
from launcher.checkpoint.tensorfile.write_behind import Behind, now
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.layout import Box


@dataclass(frozen=True)
class RankRecord:
    """What ``rank`` wrote, for ``commit``; ``strategy`` is a digest, ``files`` are by path within the folder.

    ``key`` says where the key is that the files are encrypted with.
    """

    rank: int
    world: int
    strategy: str
    files: Mapping[str, FileRecord]
    key: str | None = None


def write_rank(
    folder: Path,
    rank: int,
    strategy: Strategy,
    tensors: Mapping[str, Blob],
    extra: Mapping[str, Blob] | None = None,
    key: str | None = None,
) -> RankRecord:
    """Save this rank's share of what it holds: ``tensors`` are its pieces by first name, copies included.

    ``extra`` (random states, say) belongs to no layout and comes back to the same rank only. ``folder`` is
    ``partial(final)``; ``commit`` makes it a checkpoint once every rank has returned. Everything is checked first.
    """
    check_pieces(rank, strategy, {name: blob.spec for name, blob in tensors.items()})
    return write_share(folder, rank, strategy, tensors, extra or {}, key)


def write_share(
    folder: Path,
    rank: int,
    strategy: Strategy,
    tensors: Mapping[str, Blob],
    extra: Mapping[str, Blob],
    key: str | None = None,
) -> RankRecord:
    """As ``write_rank``, of tensors that ``check_pieces`` has seen; those that other ranks write may be missing."""
    return write_pieces(folder, rank, strategy, lambda name, _: sliced(tensors[name].data), extra, key)


def write_pieces(
    folder: Path,
    rank: int,
    strategy: Strategy,
    chunks: Callable[[str, Box], Iterable[memoryview]],
    extra: Mapping[str, Blob],
    key: str | None = None,
    behind: Behind | None = None,
) -> RankRecord:
    """As ``write_rank``; ``chunks`` gives the bytes of a box, in order. What it wrote goes when it fails.

    It is on the disk on return, or when ``behind`` is done.
    """
    home = folder / f"rank_{rank}"
    home.mkdir(parents=True, exist_ok=True)
    try:
        return _write_pieces(folder, home, rank, strategy, chunks, extra, key, behind)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise


def _write_pieces(
    folder: Path,
    home: Path,
    rank: int,
    strategy: Strategy,
    chunks: Callable[[str, Box], Iterable[memoryview]],
    extra: Mapping[str, Blob],
    key: str | None,
    behind: Behind | None,
) -> RankRecord:
    secret = None if key is None else load_key(key)
    mark = stamp(rank, strategy.grid.size, strategy.digest)
    files = {}
    for file, boxes in shares(strategy, rank).items():
        specs = {n: TensorSpec(box.shape, strategy.entries[n].dtype) for n, box in boxes.items()}
        done = write_stream(home / file, specs, _of(chunks, boxes), mark, secret, behind=behind)
        files[rank_file(rank, file)] = _record(done)
    if extra:
        specs = {n: blob.spec for n, blob in extra.items()}
        done = write_stream(home / EXTRA, specs, lambda name: sliced(extra[name].data), mark, secret, behind=behind)
        files[rank_file(rank, EXTRA)] = _record(done)
    (now if behind is None else behind.do)(partial(sync, home))
    if rank == 0:
        files |= {f"strategy/{p.name}": text_record(p) for p in strategy_file.dump(strategy, folder / "strategy")}
    return RankRecord(rank, strategy.grid.size, strategy.digest, files, key)


def _of(
    chunks: Callable[[str, Box], Iterable[memoryview]], boxes: Mapping[str, Box]
) -> Callable[[str], Iterable[memoryview]]:
    return lambda name: chunks(name, boxes[name])


def shares(strategy: Strategy, rank: int) -> dict[str, dict[str, Box]]:
    """What each file of ``rank`` holds."""
    return {file: share(strategy, rank, file) for file in rank_files(strategy)}


def rank_files(strategy: Strategy) -> tuple[str, ...]:
    """The file of a kind is there on every rank, or on none if no tensor is of it; the model's always is."""
    return tuple(dict.fromkeys(FILE_OF[kind] for kind in ("param", *strategy.kinds)))


def share(strategy: Strategy, rank: int, file: str) -> dict[str, Box]:
    """What one file of ``rank`` holds; nothing if the strategy has no tensor for it."""
    where, out = strategy.grid.coords(rank), {}
    for at, names in strategy.homes.items():
        if any(where[axis] != n for axis, n in at):
            continue
        for name in names:
            entry = strategy.entries[name]
            if FILE_OF[entry.kind] == file and (box := saved_at_home(entry.layout, rank)) is not None:
                out[name] = box
    return out


def _record(done: Written) -> FileRecord:
    return FileRecord(done.size, done.digest, done.tensors, done.salt)


def text_record(path: Path) -> FileRecord:
    """Its digest is one that nobody can make another text for: these files have no seal of their own."""
    return record_of(read_bytes(path))


def record_of(data: bytes) -> FileRecord:
    """That of a file of text with these bytes."""
    return FileRecord(len(data), hashlib.sha256(data).hexdigest(), {})


def check_pieces(rank: int, strategy: Strategy, tensors: Mapping[str, TensorSpec]) -> None:
    """Raises ``ValueError`` unless they are what ``rank`` holds, copies included, by first name."""
    if not 0 <= rank < strategy.grid.size:
        raise ValueError(f"rank {rank} is not in the strategy's world of {strategy.grid.size}")
    held = strategy.held(rank)
    found = []
    if absent := sorted(held.keys() - tensors.keys()):
        found.append(f"the strategy has it here, it was not given: {', '.join(absent)}")
    if unknown := sorted(tensors.keys() - held.keys()):
        found.append(f"given, but the strategy does not have it here: {', '.join(unknown)}")
    for name, entry in held.items():
        box = entry.layout.box(rank)
        assert box is not None
        want = TensorSpec(box.shape, entry.dtype)
        if name in tensors and tensors[name] != want:
            found.append(f"{name}: {described(tensors[name])} was given, its piece is {described(want)}")
    if found:
        raise ValueError(f"rank {rank} cannot be saved:\n" + "\n".join(f"  {f}" for f in found))
