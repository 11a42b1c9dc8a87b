"""All that shows the metrics of a run besides its console, as one; none of them can end or hold up a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import said
from launcher.job.schema.job import Job
from launcher.run.report.report import Report
from launcher.run.report.tensorboard import FOLDER, TensorBoard

_log = logging.getLogger(__name__)


class Viewers:
    """The page of a run, and TensorBoard's files where they are asked for."""

    def __init__(self, report: Report, board: TensorBoard | None) -> None:
        self.report, self._board, self._failed = report, board, False

    def feed(self, row: Mapping[str, Any]) -> None:
        self.report.feed(row)
        if self._board is not None and not self._failed:
            self._do(partial(self._board.feed, row))

    def close(self) -> None:
        if self._board is not None:
            self._do(self._board.close)

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # of a package that is not ours, about anything
            if not self._failed:
                _lost(error)
            self._failed = True


@contextmanager
def viewers(
    run: Path, job: Job, changes: Sequence[str], before: Sequence[Mapping[str, Any]]
) -> Iterator[Viewers]:
    """``changes``: what was typed; ``before``: rows of earlier starts."""
    board = _board(run, before) if job.logger.tensorboard else None
    with Report(run, job.name, changes, before) as report:
        shown = Viewers(report, board)
        try:
            yield shown
        finally:
            shown.close()


def _board(run: Path, before: Sequence[Mapping[str, Any]]) -> TensorBoard | None:
    try:
        texts = {name: (run / name).read_text(encoding="utf-8") for name in ("config.yaml", "plan.txt")}
        return TensorBoard(run, before, texts)
    except Exception as error:  # as above
        _lost(error)
        return None


def _lost(error: Exception) -> None:
    _log.warning("%s: %s; the run goes on without it", FOLDER, said(error))
