"""Writes the results of a sweep while its cells run: table, file, page, recipe of the best."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.errors import RequestError, error_text
from launcher.extras.sweep import page, summary
from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.forecast import Forecast
from launcher.extras.sweep.loss_differences import Gap, gaps
from launcher.extras.sweep.ranking import ResultLine, Results, curves, ranked_results
from launcher.extras.sweep.requests import SweepRequest
from launcher.extras.sweep.summary import figure
from launcher.job.schema import redact
from launcher.job.schema.search import Sweep
from launcher.optional import has
from launcher.run import frozen_request

_log = logging.getLogger(__name__)
EVERY_S, SHARE = 10.0, 50
"""Seconds between two writings; at least ``SHARE`` times the seconds that a writing takes."""
NAMED = 5
WAITING = ("submitted", "written")
BEST = "best.yaml"


class ResultsWriter:
    """Writes results to ``folder``, sorted by ``metric``."""

    def __init__(self, folder: Path, sweep_request: SweepRequest, metric: str) -> None:
        self._folder, self._request, self._metric = folder, sweep_request, metric
        self._next = 0.0

    @property
    def _settings(self) -> Sweep:
        return self._request.settings

    def now(self, results: Sequence[CellResult], forecasts: Mapping[str, Forecast]) -> None:
        """Writes what is known so far, from time to time. An ``OSError`` does not end the sweep."""
        began = time.monotonic()
        if began < self._next:
            return
        try:
            ranked = self._results(results, forecasts)
            summary.write_csv(self._folder, ranked, {})
            if has("run_page"):
                page.write(self._folder, ranked, running=True)
        except OSError as error:
            _log.warning("the sweep continues without its page: %s", error_text(error))
        took = time.monotonic() - began
        self._next = began + max(EVERY_S, SHARE * took)

    def end(
        self, results: Sequence[CellResult], forecasts: Mapping[str, Forecast], *, missing: bool = False
    ) -> bool:
        """Writes everything and prints the table; returns whether all compared losses agree.

        ``missing``: some cells have not begun.
        """
        ranked = self._results(results, forecasts)
        off = self._gaps(results) if self._settings.certify else {}
        summary.write_csv(self._folder, ranked, off)
        files = [summary.CSV, *self._best(ranked)]
        if has("run_page"):
            page.write(self._folder, ranked, running=False, files=files)
        print(
            "\n".join([*summary.printed(ranked, off), *self._summary_lines(ranked, off, missing)]), flush=True
        )
        return all(gap.right for gap in off.values())

    def _results(self, cell_results: Sequence[CellResult], forecasts: Mapping[str, Forecast]) -> Results:
        losses = dict(curves(self._folder, cell_results))
        return ranked_results(cell_results, forecasts, self._metric, self._settings.goal, losses)

    def _gaps(self, results: Sequence[CellResult]) -> dict[str, Gap]:
        done = [r for r in results if r.status == "done" and not r.same_as]
        precisions = {r.cell.name: self._request.compose(r.cell).job.train.precision for r in done}
        return gaps(self._folder, done, precisions)

    def _best(self, ranked: Results) -> list[str]:
        """Writes the best cell as a recipe, unless it has secrets; returns the names of the files written."""
        if ranked.best is None:
            return []
        try:
            job = self._request.compose(ranked.best.result.cell).job
        except RequestError:  # the config files have changed since
            return []
        values = job.model_dump(mode="json", by_alias=True)
        if redact.values(values) != values:
            return []
        about = f"The best of a sweep: {ranked.best.name}, {self._metric} {figure(ranked.best.value)}."
        write_text(self._folder / BEST, frozen_request.recipe_text(job, (about,)))
        return [BEST]

    def _summary_lines(self, ranked: Results, off: Mapping[str, Gap], missing: bool) -> list[str]:
        out = []
        if len(ranked.front) > 1:
            out.append(f"Pareto front of {self._metric}, speed and memory: {_names(ranked.front)}")
        if off and all(gap.right for gap in off.values()):
            most = max(gap.early for gap in off.values())
            out.append(
                f"the losses of {len(off)} cells differ by at most {most:.1e} from those of the same run in "
                "another layout"
            )
        if (self._folder / BEST).is_file() and ranked.best is not None:
            out.append(f"best: {ranked.best.name}, as a recipe in {self._folder / BEST}")
        statuses = [line.result.status for line in ranked.lines]
        done = sum(status in ("done", "pruned") for status in statuses)
        command = f"-m {shlex.quote(f'sweep_dir={self._folder}')} and the same overrides"
        if {*statuses} & {*WAITING}:
            again = f"; to show their state and submit failed cells again: {command}"
        else:
            again = f"; to run the others again: {command}" if done < len(statuses) else ""
        if missing:
            again = f"; others have not started; to continue: {command}"
        out.append(
            f"{done} of {len(ranked.lines)} done, {self._folder / summary.CSV}, {page.REPORT_FILE}{again}"
        )
        return out


def _names(lines: Sequence[ResultLine]) -> str:
    more = f" and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
    return ", ".join(line.name for line in lines[:NAMED]) + more
