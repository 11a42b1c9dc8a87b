"""``logs/console.log`` of a run folder: what the run has printed on the console.

Standard output and error of the process that leads the run, and of rank 0, are copied as they are written.
Before the run has a folder the copy is kept in memory. Progress bars write to the terminal itself, past the
copy; the file has the lines of ``logger.progress=plain`` instead.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from launcher.runtime.stdio import lossy

NAME = "logs/console.log"
_EARLY = 4096
"""Pieces of text that are kept before there is a folder."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


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
        self._file.write(_COLOR.sub("", text))
        self._file.flush()

    def flush(self) -> None:
        """Does nothing: each ``write`` flushes the file."""

    def keep_in(self, run: Path) -> None:
        """Continues the console log of ``run``. Raises ``OSError``, ``RefusedFile`` for a link."""
        # here: a refused request has no folder
        from launcher.checkpoint.tensorfile.watched_folder import make_folder
        from launcher.untrusted.files import open_below

        self.close()
        make_folder((run / NAME).parent)
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


def record_until_exit(run: Path) -> None:
    """Copies what this process, which is rank 0, prints until it ends."""
    global _log
    _log = ConsoleLog()
    _log.keep_in(run)
    copy_streams()


def terminal(stream: TextIO) -> TextIO:
    """Returns ``stream`` itself, without the copy."""
    return stream.terminal if isinstance(stream, _Copied) else stream


def copy() -> TextIO | None:
    """Returns the copy, for lines that the console shows in another form; ``None`` if nothing is recorded."""
    return _log  # type: ignore[return-value]
