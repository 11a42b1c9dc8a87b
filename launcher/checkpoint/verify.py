"""Verifies that a checkpoint on disk is what was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from launcher.checkpoint.layout.shards import saved_shards
from launcher.checkpoint.layout.tiling import untiled
from launcher.checkpoint.manifest import NAME
from launcher.checkpoint.read import Checkpoint, check_digest, file_header, open_checkpoint
from launcher.checkpoint.tensorfile.header import Header
from launcher.checkpoint.tensorfile.mmap_window import Window
from launcher.plan.values.trust import ANYONE, Trust


def verify(folder: Path, trust: Trust = ANYONE) -> list[str]:
    """Reads the whole checkpoint and returns every problem, each naming its file; empty if there is none.

    ``trust`` says who must vouch for the checkpoint.
    """
    try:
        checkpoint = open_checkpoint(folder, trust)
    except (ValueError, OSError) as error:
        return [str(error)]
    return [*_strays(checkpoint), *_gaps(checkpoint), *_files(checkpoint, _tensor_files(checkpoint))]


def damaged(folder: Path, trust: Trust, part: int, parts: int) -> list[str]:
    """Returns the problems of every ``parts``-th tensor file, starting with file number ``part`` (from 0)."""
    try:
        checkpoint = open_checkpoint(folder, trust)
    except (ValueError, OSError) as error:
        return [str(error)]
    return [*_files(checkpoint, _tensor_files(checkpoint)[part::parts])]


def _tensor_files(checkpoint: Checkpoint) -> list[str]:
    return [path for path in sorted(checkpoint.manifest.files) if path.startswith("rank_")]


def _strays(checkpoint: Checkpoint) -> Iterator[str]:
    known = {NAME, *checkpoint.manifest.files}
    for path in sorted(checkpoint.folder.rglob("*")):
        if not path.is_dir() and path.relative_to(checkpoint.folder).as_posix() not in known:
            yield f"{path}: not part of this checkpoint: the manifest does not list it"


def _gaps(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields the tensors whose shards do not tile the full tensor."""
    for name, entry in checkpoint.strategy.entries.items():
        found = untiled(entry.layout.shape, [shard.box for shard in saved_shards(entry.layout)])
        if found:
            yield f"{checkpoint.folder}: tensor {name}: {found}"


def _files(checkpoint: Checkpoint, paths: Sequence[str]) -> Iterator[str]:
    window = Window(checkpoint.key)
    for path in paths:
        folder, file = path.split("/")
        try:
            header = file_header(checkpoint, int(folder.removeprefix("rank_")), file)
        except (ValueError, OSError) as error:
            yield str(error)
            continue
        yield from _tensors(checkpoint, path, header, window)


def _tensors(checkpoint: Checkpoint, file: str, header: Header, window: Window) -> Iterator[str]:
    for name, slot in header.entries.items():
        digest = xxhash.xxh3_128()
        try:
            for chunk in window.chunks(checkpoint.folder / file, slot):
                digest.update(chunk)
            check_digest(checkpoint, file, name, digest.hexdigest())
        except ValueError as error:
            yield str(error)
