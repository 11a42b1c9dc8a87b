"""A run's page, TensorBoard files and loggers. Each may be missing; a failure never stops the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import error_text
from launcher.job.schema.job import Job
from launcher.optional import has, metric_loggers, run_page

_log = logging.getLogger(__name__)

STOPPED_S = 5.0
"""The most seconds that a stopped run waits for its loggers, as it may soon be killed."""


class Viewers:
    """A run's page, TensorBoard files if requested, and loggers in separate processes."""

    def __init__(
        self,
        page: run_page.RunReport | None,
        board: metric_loggers.TensorBoard | None,
        others: Sequence[metric_loggers.LoggerProcess],
    ) -> None:
        self.page, self.others = page, others
        self._board, self._failed = board, False

    def feed(self, row: Mapping[str, Any]) -> None:
        if self.page is not None:
            self.page.feed(row)
        if self._board is not None and not self._failed:
            self._do(partial(self._board.feed, row))
        if self.others:
            line = json.dumps(row).encode()
            for one in self.others:
                one.feed(line, int(row["step"]))

    def close(self, how: str, wait_s: float) -> None:
        if self._board is not None:
            self._do(self._board.close)
        if self.others:
            metric_loggers.end(self.others, how, wait_s)

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # a foreign package may raise anything
            if not self._failed:
                _lost(metric_loggers.FOLDER, error)
            self._failed = True


@contextmanager
def viewers(
    run: Path, job: Job, changes: Sequence[str], before: Iterable[Mapping[str, Any]]
) -> Iterator[Viewers]:
    """The viewers of a run; ``changes``: the typed settings, ``before``: rows of earlier starts."""
    board = _board(run, before) if job.logger.tensorboard else None
    with ExitStack() as stack:
        page = None
        if has("run_page"):
            page = stack.enter_context(run_page.RunReport(run, job.name, changes, before))
        shown = Viewers(page, board, _others(run, job, sum(1 for _ in before)) if job.logger.services else [])
        try:
            yield shown
        except BaseException as error:
            failed = isinstance(error, Exception)
            wait_s = job.logger.wait_s if failed else min(job.logger.wait_s, STOPPED_S)
            shown.close("failed" if failed else "stopped", wait_s)
            raise
        shown.close("done", job.logger.wait_s)


def _board(run: Path, before: Iterable[Mapping[str, Any]]) -> metric_loggers.TensorBoard | None:
    try:
        return metric_loggers.board(run, before)
    except Exception as error:  # as above
        _lost(metric_loggers.FOLDER, error)
        return None


def _others(run: Path, job: Job, before: int) -> list[metric_loggers.LoggerProcess]:
    processes: list[metric_loggers.LoggerProcess] = []
    try:
        processes += metric_loggers.begun(job, run, before)
    except Exception as error:  # the system starts no process, or a file cannot be written
        _lost("loggers", error)
    return processes


def _lost(viewer: str, error: Exception) -> None:
    _log.warning("%s: %s; the run continues without it", viewer, error_text(error))
