"""Writes the results of a sweep, while it runs and at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.errors import RequestError, said
from launcher.job.schema import redact
from launcher.job.schema.sweep import Sweep
from launcher.run import recipe_of_job
from launcher.sweep.cell_process import CellResult
from launcher.sweep.forecast import Forecast
from launcher.sweep.requests import SweepRequest
from launcher.sweep.results import report, summary
from launcher.sweep.results.compare_losses import Gap, gaps
from launcher.sweep.results.ranking import Line, Results, curves, results
from launcher.sweep.results.table import figure

BEST = "best.yaml"
EVERY_S, SHARE = 10.0, 50
"""Seconds between two writings; at least ``SHARE`` times the seconds that a writing takes."""
NAMED = 5
WAITING = ("submitted", "written")

_log = logging.getLogger(__name__)


class Outcome:
    """Writes results to ``folder``, sorted by ``metric``."""

    def __init__(self, folder: Path, asked: SweepRequest, metric: str) -> None:
        self._folder, self._asked, self._metric = folder, asked, metric
        self._next = 0.0

    @property
    def _settings(self) -> Sweep:
        return self._asked.settings

    def now(self, found: Sequence[CellResult], forecasts: Mapping[str, Forecast]) -> None:
        """Writes what is known so far, from time to time. An ``OSError`` does not end the sweep."""
        began = time.monotonic()
        if began < self._next:
            return
        try:
            ranked = self._results(found, forecasts)
            summary.write(self._folder, ranked, {})
            report.write(self._folder, ranked, running=True)
        except OSError as error:
            _log.warning("the sweep goes on without its page: %s", said(error))
        took = time.monotonic() - began
        self._next = began + max(EVERY_S, SHARE * took)

    def end(
        self, found: Sequence[CellResult], forecasts: Mapping[str, Forecast], *, missing: bool = False
    ) -> bool:
        """Writes everything and prints the table; returns whether all compared losses agree.

        ``missing``: some cells have not begun.
        """
        ranked = self._results(found, forecasts)
        off = self._gaps(found) if self._settings.certify else {}
        summary.write(self._folder, ranked, off)
        files = [summary.CSV, *self._best(ranked)]
        report.write(self._folder, ranked, running=False, files=files)
        print("\n".join([*summary.printed(ranked, off), *self._told(ranked, off, missing)]), flush=True)
        return all(gap.right for gap in off.values())

    def _results(self, found: Sequence[CellResult], forecasts: Mapping[str, Forecast]) -> Results:
        losses = dict(curves(self._folder, found))
        return results(found, forecasts, self._metric, self._settings.goal, losses)

    def _gaps(self, found: Sequence[CellResult]) -> dict[str, Gap]:
        done = [r for r in found if r.status == "done" and not r.same_as]
        precisions = {r.cell.name: self._asked.compose(r.cell).job.train.precision for r in done}
        return gaps(self._folder, done, precisions)

    def _best(self, ranked: Results) -> list[str]:
        """Writes the best cell as a recipe, unless it has secrets; returns the names of the files written."""
        if ranked.best is None:
            return []
        try:
            job = self._asked.compose(ranked.best.result.cell).job
        except RequestError:  # the files have changed since
            return []
        values = job.model_dump(mode="json", by_alias=True)
        if redact.values(values) != values:
            return []
        about = f"The best of a sweep: {ranked.best.name}, {self._metric} {figure(ranked.best.value)}."
        write_text(self._folder / BEST, recipe_of_job.text(job, (about,)))
        return [BEST]

    def _told(self, ranked: Results, off: Mapping[str, Gap], missing: bool) -> list[str]:
        out = []
        if len(ranked.front) > 1:
            out.append(f"front of {self._metric}, speed and memory: {_names(ranked.front)}")
        if off and all(gap.right for gap in off.values()):
            most = max(gap.early for gap in off.values())
            out.append(f"the losses of {len(off)} cells are those of the first of their kind, to {most:.1e}")
        if (self._folder / BEST).is_file() and ranked.best is not None:
            out.append(f"best: {ranked.best.name}, as a recipe in {self._folder / BEST}")
        statuses = [line.result.status for line in ranked.lines]
        done = sum(status in ("done", "pruned") for status in statuses)
        again = f": -m sweep_dir={self._folder} and the same overrides"
        if {*statuses} & {*WAITING}:
            again = f"; how far they are is said, and what failed is submitted again, by{again[1:]}"
        else:
            again = f"; to run those again{again}" if done < len(statuses) else ""
        if missing:
            again = f"; others have not begun, to go on: -m sweep_dir={self._folder} and the same overrides"
        out.append(f"{done} of {len(ranked.lines)} done, {self._folder / summary.CSV}, {report.NAME}{again}")
        return out


def _names(lines: Sequence[Line]) -> str:
    more = f" and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
    return ", ".join(line.name for line in lines[:NAMED]) + more
