"""Reports progress through a corpus on the console: a bar on a terminal, otherwise lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from launcher.data.prepare.corpus_files import CorpusFile
from launcher.data.prepare.shards import Progress

Mode = Literal["auto", "bar", "plain", "off"]
EVERY_S = 10.0  # seconds between lines
DRAWN_S = 0.1  # seconds between updates of a bar
MB = 1_000_000


class Speed:
    """Reports the work done and MB of text per second; as a context manager it closes its bar."""

    def __init__(
        self,
        mode: Mode,
        say: Callable[[str], None],
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if out is None:  # a bar bypasses the console's copy that the run's leader keeps
            out = getattr(sys.stdout, "terminal", sys.stdout)
        if mode == "auto":
            mode = "bar" if out.isatty() and not Console(file=out).is_dumb_terminal else "plain"
        self._mode, self._say, self._out, self._clock = mode, say, out, clock
        self._bar: RichProgress | None = None
        self._sizes: list[int] = []
        self._start, self._told, self._before = 0.0, 0.0, 0

    def __enter__(self) -> Speed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, files: Sequence[CorpusFile], done: Progress) -> None:
        """Starts a report; ``done`` is the progress of an earlier start. A later call starts another one."""
        if self._bar is not None:
            self._bar.stop()
        self._sizes, self._before = [file.size for file in files], done.nbytes
        self._start = self._told = self._clock()
        if self._mode == "bar":
            columns = (
                TextColumn("prepare {task.percentage:3.0f} %"),
                BarColumn(None),
                TextColumn("{task.description}"),
            )
            self._bar = RichProgress(
                *columns, console=Console(file=self._out), auto_refresh=False, expand=True
            )
            self._bar.add_task("", total=max(sum(self._sizes), 1))
            self._bar.start()

    def __call__(self, done: Progress) -> None:
        if self._mode == "off" or self._clock() - self._told < (DRAWN_S if self._bar else EVERY_S):
            return
        self._told = self._clock()
        rate = (done.nbytes - self._before) / MB / max(self._told - self._start, 1e-9)
        file = f"file {done.position.file + 1} of {len(self._sizes)}"
        text = f"{done.nbytes / MB:.0f} MB, {done.tokens:,} tokens, {rate:.1f} MB/s, {file}"
        if self._bar is None:
            self._say(f"prepare: {text}")
            return
        read = sum(self._sizes[: done.position.file])
        read += min(done.position.offset, self._sizes[done.position.file])
        self._bar.update(self._bar.task_ids[0], completed=read, description=text, refresh=True)
