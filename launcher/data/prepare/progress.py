"""Shows the progress of ``prepare``: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TextIO

from launcher.data.prepare.corpus_formats import CorpusFile
from launcher.data.prepare.documents import Position

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Mode = Literal["auto", "bar", "plain", "off"]
DUMB = ("dumb", "unknown")  # values of TERM for terminals that cannot redraw a line
EVERY_S = 10.0  # seconds between lines
DRAWN_S = 0.1  # seconds between updates of a bar
MB = 1_000_000


@dataclass(frozen=True)
class Progress:
    """The work done before ``position``. ``skipped`` counts rows left out, ``nbytes`` bytes of text."""

    position: Position = field(default_factory=Position)
    shards: int = 0
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    nbytes: int = 0


class ProgressReporter:
    """Shows the work done and the MB of text per second. As a context manager, it closes its bar."""

    def __init__(
        self,
        mode: Mode,
        say: Callable[[str], None],
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if out is None:  # a bar is not written to the log that the run's leader keeps of the console
            out = getattr(sys.stdout, "terminal", sys.stdout)
        if mode == "auto":
            mode = "bar" if out.isatty() and os.environ.get("TERM") not in DUMB else "plain"
        self._mode, self._say, self._out, self._clock = mode, say, out, clock
        self._bar: RichProgress | None = None
        self._sizes: list[int] = []
        self._start, self._reported, self._before = 0.0, 0.0, 0

    def __enter__(self) -> ProgressReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, files: Sequence[CorpusFile], done: Progress) -> None:
        """Starts a report; ``done`` is the progress of an earlier start. Each call starts a new report."""
        if self._bar is not None:
            self._bar.stop()
        self._sizes, self._before = [file.size for file in files], done.nbytes
        self._start = self._reported = self._clock()
        if self._mode == "bar":
            self._bar = self._new_bar()
            self._bar.start()

    def _new_bar(self) -> RichProgress:
        from rich.console import Console  # only a bar on a terminal needs rich
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("prepare {task.percentage:3.0f} %"),
            BarColumn(None),
            TextColumn("{task.description}"),
        )
        bar = RichProgress(*columns, console=Console(file=self._out), auto_refresh=False, expand=True)
        bar.add_task("", total=max(sum(self._sizes), 1))
        return bar

    def __call__(self, done: Progress) -> None:
        if self._mode == "off" or self._clock() - self._reported < (DRAWN_S if self._bar else EVERY_S):
            return
        self._reported = self._clock()
        rate = (done.nbytes - self._before) / MB / max(self._reported - self._start, 1e-9)
        file = f"file {done.position.file + 1} of {len(self._sizes)}"
        text = f"{done.nbytes / MB:.0f} MB, {done.tokens:,} tokens, {rate:.1f} MB/s, {file}"
        if self._bar is None:
            self._say(f"prepare: {text}")
            return
        read = sum(self._sizes[: done.position.file])
        read += min(done.position.offset, self._sizes[done.position.file])
        self._bar.update(self._bar.task_ids[0], completed=read, description=text, refresh=True)
