"""Log files of a rank, and log messages on the console."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import QueueHandler
from pathlib import Path
from typing import TextIO

from launcher.checkpoint.tensorfile.disk import BROKEN, FULL
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.runtime.console_log import record_until_exit
from launcher.runtime.faults import log_file
from launcher.runtime.stdio import lossy
from launcher.untrusted.files import open_below


class Relay(QueueHandler):
    """Sends each record, prepared for pickling, instead of writing it."""

    def __init__(self, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(queue=None)  # type: ignore[arg-type]
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        self._send(record)


class Console(logging.StreamHandler[TextIO]):
    """Writes to the current standard error: a progress bar replaces it while it is drawn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class LogFile(logging.FileHandler):
    """Drops records that do not fit on a full disk, instead of ending the run or printing tracebacks."""

    def _open(self) -> TextIOWrapper:
        fd = _opened(Path(self.baseFilename), os.O_APPEND if self.mode == "a" else os.O_TRUNC)
        return TextIOWrapper(open(fd, f"{self.mode}b"), encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError) or error.errno not in (*FULL, *BROKEN):
            super().handleError(record)


def _opened(path: Path, how: int) -> int:
    """Opens a file for writing; refuses links, also for its folder."""
    return open_below(path.parent.parent, Path(path.parent.name, path.name), os.O_WRONLY | os.O_CREAT | how)


def console() -> None:
    """Shows the log of this process and its rank 0, unless the embedding program has its own handlers."""
    if not logging.getLogger().handlers:
        _install([_handler(Console(), "%(message)s")])


def configure(rank: int, folder: Path | None, console: logging.Handler | None = None) -> None:
    """Sends rank 0's log to the console and its file, and another rank's log and output to its file.

    ``console`` replaces rank 0's console if the supervisor owns it. Without a run folder the other ranks also
    log to the console, with the rank in each line.
    """
    if rank == 0 and folder is not None and console is not None:
        record_until_exit(folder)
    handlers = [] if rank else [console or _handler(Console(), "%(message)s")]
    if folder is None:
        _install(handlers or [_handler(logging.StreamHandler(), f"rank {rank}: %(message)s")])
        return
    path = log_file(folder, rank)
    make_folder(path.parent)
    if rank:
        _redirect(path)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    _install([*handlers, _handler(LogFile(path, encoding="utf-8"), form)])


def _redirect(path: Path) -> None:
    """Redirects standard output and error, including native code's, to the end of ``path``; empties stdin."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(_opened(path, os.O_APPEND), "ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = lossy(1), lossy(2)


def _handler(handler: logging.Handler, form: str) -> logging.Handler:
    handler.setFormatter(logging.Formatter(form))
    return handler


def _install(handlers: list[logging.Handler]) -> None:
    # no force=True: it would close the handlers of the process this one was forked from
    logging.getLogger().handlers[:] = handlers
    own = logging.getLogger("launcher")
    if own.level != logging.INFO:  # setting it writes to all loggers, so each rank would copy their memory
        own.setLevel(logging.INFO)
