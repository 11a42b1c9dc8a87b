"""Combines everything that shows metrics besides the console; nothing here can end or delay a run."""

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
"""The most seconds that a stopped run waits for its loggers, as it may soon be killed."""


class Viewers:
    """A run's page, TensorBoard files if requested, and loggers in separate processes."""

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
        except Exception as error:  # a foreign package may raise anything
            if not self._failed:
                _lost(FOLDER, error)
            self._failed = True


@contextmanager
def viewers(
    run: Path, job: Job, changes: Sequence[str], before: Sequence[Mapping[str, Any]]
) -> Iterator[Viewers]:
    """The viewers of a run; ``changes``: the typed settings, ``before``: rows of earlier starts."""
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
    except Exception as error:  # the system starts no process, or the folder takes no file
        _lost("loggers", error)
    return found


def _lost(what: str, error: Exception) -> None:
    _log.warning("%s: %s; the run goes on without it", what, said(error))
