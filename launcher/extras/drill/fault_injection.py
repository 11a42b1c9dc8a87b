"""Injects the planned fault of a drill into this rank."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from launcher.checkpoint.manifest import FILE_OF
from launcher.checkpoint.store import latest
from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.checkpoint.tensorfile.watched_folder import open_file
from launcher.checkpoint.write import Chunks, RankRecord, RankWriter
from launcher.errors import RunError
from launcher.extras.drill import record
from launcher.plan.drill import WRITING, DrillFault
from launcher.plan.resolve.encryption import Trust
from launcher.plan.values.layout import Box
from launcher.runtime.cluster.world import World

WEIGHTS = FILE_OF["param"]
_LENGTH = 8  # bytes of the number that contains the header's length in a tensor file


def flip(checkpoints: Path, rank: int, trust: Trust) -> Path:
    """Flips a bit in the middle of the weights of ``rank``, or of another rank; returns the file."""
    newest = latest(checkpoints, trust)
    if newest is None:
        raise RunError(f"{checkpoints}: no checkpoint exists yet, so debug.drill.bitflip cannot flip a bit")
    files = [*newest.glob(f"rank_{rank}/{WEIGHTS}"), *sorted(newest.glob(f"rank_*/{WEIGHTS}"))]
    path = next(file for file in files if _data(file))

    # flip the bit on the disk
    fd = open_file(path, os.O_RDWR)
    try:
        at = os.fstat(fd).st_size - 1 - _data(path) // 2
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ 1]), at)
        os.fsync(fd)
    finally:
        os.close(fd)
    return path


def _data(path: Path) -> int:
    """Returns the bytes of tensors in the file."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(_LENGTH), "little")
    return max(0, path.stat().st_size - _LENGTH - header)


class RankDrill:
    """The drill of one attempt; created before its first step, when no rank can have failed yet."""

    def __init__(self, fault: DrillFault, world: World, run: Path, trust: Trust) -> None:
        self._fault = fault
        self._world = world
        self._run = run
        self._trust = trust
        happened = record.read(run, record.HAPPENED, fault)
        self._due = happened is None and world.rank in fault.ranks
        self._slow = False
        self._again = world.rank == 0 and happened is not None

    def before(self, step: int) -> None:
        """Called at the start of the optimizer step ``step``, outside of collectives."""
        if self._due and step == self._fault.step and self._fault.kind not in WRITING:
            self._happen()
            {"kill_rank": die, "lose_node": die, "hang_rank": hang, "bitflip": self._flip}.get(
                self._fault.kind, self._slow_down
            )()
        if self._slow:
            time.sleep(self._fault.ms / 1e3)

    def after(self, step: int) -> None:
        """Called after the optimizer step ``step``: rank 0 records the first step after the fault."""
        if self._again:
            record.note(self._run, record.RECOVERED, self._fault, resumed=step - 1)
            self._again = False

    def put(
        self, step: int, writer: RankWriter, chunks: Chunks, extra: Mapping[str, Blob]
    ) -> Callable[[], RankRecord]:
        """Returns the function that writes this rank's files of the checkpoint of ``step``."""
        if self._due and step == self._fault.step and self._fault.kind in WRITING:
            return partial(self._broken, writer, chunks, extra)
        return partial(writer.write, chunks, extra)

    def _happen(self) -> None:
        self._due = False
        record.note(self._run, record.HAPPENED, self._fault, attempt=self._world.attempt)

    def _slow_down(self) -> None:
        self._slow = True

    def _flip(self) -> NoReturn:
        flip(self._run / "checkpoints", self._world.rank, self._trust)
        die()

    def _broken(self, writer: RankWriter, chunks: Chunks, extra: Mapping[str, Blob]) -> RankRecord:
        """Writes half of the first tensor, then fails.

        A rank that writes no tensors fails after it has written its complete files.
        """
        self._happen()
        end = die if self._fault.kind == "torn_write" else partial(raise_disk_full, writer.folder)

        def half(name: str, box: Box) -> Iterator[memoryview]:
            for chunk in chunks(name, box):
                if chunk.nbytes:
                    yield chunk[: chunk.nbytes // 2]
                    end()
                yield chunk

        writer.write(half, extra)
        end()


def die() -> NoReturn:
    """Ends the process like the kernel's out-of-memory killer: at once, without a message."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")


def hang() -> NoReturn:
    """Blocks until the process is ended from outside."""
    while True:
        time.sleep(3600)


def raise_disk_full(folder: Path) -> NoReturn:
    """Raises the error of a full disk, without filling the real one."""
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (debug.drill.disk_full)", str(folder))
