"""All that shows the metrics of a run besides its console, as one; none of them can end or hold up a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import said
from launcher.job.schema.job import Job
from launcher.run.report.loggers import logger_process, start
from launcher.run.report.loggers.logger_process import LoggerProcess
from launcher.run.report.loggers.tensorboard import FOLDER, TensorBoard
from launcher.run.report.report import Report

_log = logging.getLogger(__name__)

STOPPED_S = 5.0
"""The most that a run waits for its loggers when it is told to stop: soon it may be killed."""


class Viewers:
    """The page of a run, TensorBoard's files where they are asked for, loggers in processes of their own."""

    def __init__(self, report: Report, board: TensorBoard | None, others: Sequence[LoggerProcess]) -> None:
        self.report, self.others = report, others
        self._board, self._failed = board, False

    def feed(self, row: Mapping[str, Any]) -> None:
        self.report.feed(row)
        if self._board is not None and not self._failed:
            self._do(partial(self._board.feed, row))
        if self.others:
            line = json.dumps(row).encode()
            for one in self.others:
                one.feed(line, int(row["step"]))

    def close(self, how: str, wait_s: float) -> None:
        if self._board is not None:
            self._do(self._board.close)
        logger_process.end(self.others, how, wait_s)

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # of a package that is not ours, about anything
            if not self._failed:
                _lost(FOLDER, error)
            self._failed = True


@contextmanager
def viewers(
    run: Path, job: Job, changes: Sequence[str], before: Sequence[Mapping[str, Any]]
) -> Iterator[Viewers]:
    """``changes``: what was typed; ``before``: rows of earlier starts."""
    board = _board(run, before) if job.logger.tensorboard else None
    with Report(run, job.name, changes, before) as report:
        shown = Viewers(report, board, _others(run, job, len(before)))
        try:
            yield shown
        except BaseException as error:
            failed = isinstance(error, Exception)
            wait_s = job.logger.wait_s if failed else min(job.logger.wait_s, STOPPED_S)
            shown.close("failed" if failed else "stopped", wait_s)
            raise
        shown.close("done", job.logger.wait_s)


def _board(run: Path, before: Sequence[Mapping[str, Any]]) -> TensorBoard | None:
    try:
        texts = {name: (run / name).read_text(encoding="utf-8") for name in ("config.yaml", "plan.txt")}
        return TensorBoard(run, before, texts)
    except Exception as error:  # as above
        _lost(FOLDER, error)
        return None


def _others(run: Path, job: Job, before: int) -> list[LoggerProcess]:
    found: list[LoggerProcess] = []
    try:
        found += start.begun(job, run, before)
    except Exception as error:  # of a system that starts no process, or a folder that takes no file
        _lost("loggers", error)
    return found


def _lost(what: str, error: Exception) -> None:
    _log.warning("%s: %s; the run goes on without it", what, said(error))
