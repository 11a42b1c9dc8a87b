"""Console and log files of a rank.

Standard output and error of the process that leads the run, and of rank 0, are copied as they are written.
Before the run has a folder the copy is kept in memory. Progress bars write to the terminal itself, past the
copy; the lines that stand for them in the file are those of ``logger.progress=plain``.
"""

from __future__ import annotations

import io
import logging
import os
import re
import stat
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any, TextIO

from launcher.checkpoint.tensorfile.disk import BROKEN, FULL
from launcher.runtime.faults import log_file
from launcher.untrusted.files import open_below


class _Lossy(io.FileIO):
    """A file that drops what does not fit on the disk."""

    def write(self, data: Any) -> int:
        from launcher.checkpoint.tensorfile.disk import BROKEN, FULL

        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (*FULL, *BROKEN):
                raise
            return memoryview(data).nbytes


def lossy(fd: int) -> TextIO:
    """A standard stream that is a file: a full disk does not end the run."""
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
    """Makes standard streams ``lossy`` if they are files, as under ``sbatch``."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            stream.flush()
            setattr(sys, name, lossy(fd))
            setattr(sys, f"__{name}__", getattr(sys, name))


NAME = "logs/console.log"
_EARLY = 4096
"""Pieces of text that are kept before there is a folder."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ConsoleLog:
    """The copy: in memory until ``keep_in`` names a run folder."""

    def __init__(self) -> None:
        self._early: deque[str] = deque(maxlen=_EARLY)
        self._file: TextIO | None = None
        self._fd: int | None = None

    def write(self, text: str) -> None:
        if self._file is None:
            self._early.append(text)
            return
        self._file.write(_COLOUR.sub("", text))
        self._file.flush()

    def flush(self) -> None:
        """Does nothing: each ``write`` flushes the file."""

    def keep_in(self, run: Path) -> None:
        """Continues the console log of ``run``. Raises ``OSError``, ``RefusedFile`` for a link."""
        from launcher.untrusted.files import open_below  # here: a refused request has no folder

        self.close()
        (run / NAME).parent.mkdir(exist_ok=True)
        self._fd = open_below(run, NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file = lossy(self._fd)
        self.write("".join(self._early))
        self._early.clear()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._file = self._fd = None


class _Copied:
    """A standard stream that is copied to ``log``; ``terminal`` is the stream itself."""

    def __init__(self, terminal: TextIO, log: ConsoleLog) -> None:
        self.terminal = terminal
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self.terminal.write(text)

    def writelines(self, lines: Iterator[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


_log: ConsoleLog | None = None
"""The copy of this process, while output is recorded."""


@contextmanager
def recorded() -> Iterator[None]:
    """Copies what the block prints, and the traceback of an error that leaves it."""
    global _log
    outer, streams = _log, (sys.stdout, sys.stderr)
    _log = log = ConsoleLog()
    copy_streams()
    try:
        yield
    except Exception:
        log.write(traceback.format_exc())
        raise
    finally:
        sys.stdout, sys.stderr = streams
        log.close()
        _log = outer


def copy_streams() -> None:
    """Copies standard output and error as they are now; while a progress bar is drawn they are replaced."""
    if _log is not None:
        sys.stdout, sys.stderr = _Copied(sys.stdout, _log), _Copied(sys.stderr, _log)


def keep_in(run: Path) -> None:
    """Writes the copy to the folder of ``run`` from now on; does nothing if nothing is recorded."""
    if _log is not None:
        _log.keep_in(run)


def record_rank(run: Path) -> None:
    """Copies what this process, which is rank 0, prints until it ends."""
    global _log
    _log = ConsoleLog()
    _log.keep_in(run)
    copy_streams()


def terminal(stream: TextIO) -> TextIO:
    """``stream`` itself, without the copy."""
    return stream.terminal if isinstance(stream, _Copied) else stream


def copy() -> TextIO | None:
    """The copy, for lines that the console shows in another form; ``None`` if nothing is recorded."""
    return _log  # type: ignore[return-value]


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
    """Rank 0 logs to the console and to its file; another rank's log and output go to its file.

    ``console`` replaces rank 0's console if the supervisor owns it. Without a run folder the other ranks also
    log to the console, with the rank in each line.
    """
    if rank == 0 and folder is not None and console is not None:
        record_rank(folder)
    handlers = [] if rank else [console or _handler(Console(), "%(message)s")]
    if folder is None:
        _install(handlers or [_handler(logging.StreamHandler(), f"rank {rank}: %(message)s")])
        return
    path = log_file(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
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
    logging.getLogger("launcher").setLevel(logging.INFO)
