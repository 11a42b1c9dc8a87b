"""Standard streams that are files on a full disk: what does not fit is lost, and the run goes on."""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any, TextIO


class _Lossy(io.FileIO):
    """A file that loses what the disk has no room for."""

    def write(self, data: Any) -> int:
        from launcher.checkpoint.tensorfile.disk_space import BROKEN, FULL

        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (*FULL, *BROKEN):
                raise
            return memoryview(data).nbytes


def lossy(fd: int) -> TextIO:
    """A standard stream that is a file: what it has no room for is no reason to end a run."""
    file = io.BufferedWriter(_Lossy(fd, "wb", closefd=False))
    return io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=fd == 2)


def spare_streams() -> None:
    """Make the standard streams ``lossy`` where they are files, as under ``sbatch``."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and stat.S_ISREG(os.fstat(fd).st_mode):
            stream.flush()
            setattr(sys, name, lossy(fd))
            setattr(sys, f"__{name}__", getattr(sys, name))
