"""Opens closed standard streams, and drops output that does not fit on a full disk."""

from __future__ import annotations

import io
import os
import stat
import sys
from contextlib import suppress
from typing import Any, TextIO


class _Lossy(io.FileIO):
    """A file that drops what does not fit on the disk. Standard error says so once of standard output."""

    _reported = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            from launcher.checkpoint.tensorfile.disk import BROKEN, FULL

            if error.errno not in (*FULL, *BROKEN):
                raise
            if self.fileno() == 1 and not self._reported:
                self._reported = True
                text = f"standard output: {os.strerror(error.errno or 0)}; what does not fit is lost"
                with suppress(OSError):
                    os.write(2, f"{text}\n".encode())
            return memoryview(data).nbytes


def lossy(fd: int) -> TextIO:
    """Returns a stream for the file at ``fd`` that drops what does not fit.

    So a full disk does not end the run.
    """
    file = io.BufferedWriter(_Lossy(fd, "wb", closefd=False))
    return io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=fd == 2)


def open_missing() -> None:
    """Opens standard descriptors that are closed, as cron and daemons leave them, on /dev/null.

    Call it before any other file is opened: a pipe or a log would get descriptor 1, and would be closed, or
    written to, as the standard output of a child process.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)

        # Python has no stream for a descriptor that was closed when it started
        if getattr(sys, name) is None:
            stream = io.TextIOWrapper(io.FileIO(fd, mode, closefd=False), "utf-8", "backslashreplace")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def spare_streams() -> None:
    """Makes standard streams ``lossy`` if they are files, as under ``sbatch``, or devices, as /dev/full."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not os.isatty(fd)):
            stream.flush()
            setattr(sys, name, lossy(fd))
            setattr(sys, f"__{name}__", getattr(sys, name))
