"""Flips one bit of the newest checkpoint, as a bad cable or a bad disk does."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.checkpoint.manifest import FILE_OF
from launcher.checkpoint.store import latest
from launcher.errors import RunError
from launcher.plan.values.trust import Trust

WEIGHTS = FILE_OF["param"]
_LENGTH = 8  # bytes of the number that contains the header's length in a tensor file


def flip(checkpoints: Path, rank: int, trust: Trust) -> Path:
    """Flips a bit in the middle of the weights of ``rank``, or of another rank; returns the file."""
    newest = latest(checkpoints, trust)
    if newest is None:
        raise RunError(
            f"{checkpoints}: there is no checkpoint yet in which debug.drill.bitflip could flip a bit"
        )
    files = [*newest.glob(f"rank_{rank}/{WEIGHTS}"), *sorted(newest.glob(f"rank_*/{WEIGHTS}"))]
    path = next(file for file in files if _data(file))

    # flip the bit on the disk
    fd = os.open(path, os.O_RDWR)
    try:
        at = os.fstat(fd).st_size - 1 - _data(path) // 2
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ 1]), at)
        os.fsync(fd)
    finally:
        os.close(fd)
    return path


def _data(path: Path) -> int:
    """Bytes of tensors in the file."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(_LENGTH), "little")
    return max(0, path.stat().st_size - _LENGTH - header)
