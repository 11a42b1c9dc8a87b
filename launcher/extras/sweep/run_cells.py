"""Runs cells side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.extras.sweep import cell_process, folder
from launcher.extras.sweep.cell_process import CellProcess, CellResult
from launcher.extras.sweep.forecast import Forecast
from launcher.extras.sweep.metrics_rows import RowReader, measured, reports
from launcher.extras.sweep.requests import CheckedCell
from launcher.extras.sweep.results_writer import ResultsWriter
from launcher.extras.sweep.sampler import Sampler
from launcher.extras.sweep.slots import CellSlot, Slots
from launcher.extras.sweep.summary import Watch
from launcher.job.sweep_grid import Cell
from launcher.runtime.faults import Interrupted, signal_name
from launcher.runtime.signals import StopFlag
from launcher.untrusted.files import RefusedFile

_log = logging.getLogger(__name__)


LOOK_S = 0.1
ROWS_S = 1.0
"""Seconds between two reads of the cells' metrics."""


@dataclass
class _Work:
    process: CellProcess
    slot: CellSlot
    reader: RowReader
    pruned: str = ""


@dataclass
class CellRuns:
    """Runs cells; none starts after ``deadline`` (monotonic clock). ``results``: in the order of ending."""

    folder: Path
    sampler: Sampler
    slots: Slots
    command: Sequence[str]
    metric: str
    stop_flag: StopFlag
    watch: Watch
    outcome: ResultsWriter
    deadline: float | None = None
    results: dict[str, CellResult] = field(default_factory=dict)
    forecasts: dict[str, Forecast] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._work: dict[str, _Work] = {}
        self._first: dict[str, str] = {}
        self._looked = 0.0
        self._dropped = False

    def run(self) -> tuple[CellResult, ...]:
        """Runs all cells; returns their results after the last process has ended."""
        waiting: CheckedCell | None = None
        while True:
            try:
                if waiting is None and not self._over and not self.sampler.finished:
                    waiting = self.sampler.ask()
                if waiting is not None and self._over:
                    waiting, self._dropped = None, True
                if waiting is not None and self._begin(waiting):
                    waiting = None
                    continue
                self._look()
                if waiting is None and not self._work and (self._over or self.sampler.finished):
                    return self._all()
                time.sleep(LOOK_S)
            except Interrupted:  # the second signal
                for work in self._work.values():
                    work.process.end()

    @property
    def missing(self) -> bool:
        """True if some cells have not started."""
        return self._dropped or (self._over and not self.sampler.finished)

    @property
    def _over(self) -> bool:
        late = self.deadline is not None and time.monotonic() > self.deadline
        return bool(self.stop_flag.signum) or late

    def _begin(self, one: CheckedCell) -> bool:
        """Starts a cell, unless it need not run; returns false if there is no free slot."""
        cell, forecast = one.cell, one.forecast
        if forecast is not None:
            self.forecasts[cell.name] = forecast
            if self._first.setdefault(forecast.digest, cell.name) != cell.name:
                same = CellResult(cell, "same", same_as=self._first[forecast.digest])
                self.results[cell.name] = same
                self.watch.ended(same, known=True)
                return True

        # its result is known, or it will not run
        done = cell_process.known_result(self.folder, cell)
        why = folder.pruned(self.folder).get(cell.name)
        if done is not None and done.status == "done":
            self._end(done, known=True)
        elif why is not None:
            self._end(CellResult(cell, "pruned", error=why), known=True)
        elif one.refused:
            self._end(CellResult(cell, "refused", error=one.refused), known=False)
        else:
            slot = self.slots.take(forecast)
            if slot is None:
                return False
            self._start(cell, slot)
        return True

    def _start(self, cell: Cell, slot: CellSlot) -> None:
        locked = cell_process.still_running(self.folder, cell)
        if locked is not None:
            self.slots.give_back(slot)
            self._end(locked, known=False)
            return
        run = self.folder / cell.name
        try:
            process = CellProcess(self.folder, cell, self.command, slot.env)
        except RefusedFile as error:  # a link that was made since the sweep began
            self.slots.give_back(slot)
            self._end(CellResult(cell, "failed", error=str(error)), known=False)
            return
        self._work[cell.name] = _Work(process, slot, RowReader(run))
        self.watch.began(cell)

    def _look(self) -> None:
        """Checks for cells that have ended, and from time to time reads the metrics of running cells."""
        for name, work in [*self._work.items()]:
            if self.stop_flag.signum:
                work.process.stop()
            ended, why = self._why(work)
            result = work.process.result(ended, why)
            if result is not None:
                del self._work[name]
                self.slots.give_back(work.slot)
                self._end(result, known=False)
        if time.monotonic() - self._looked > ROWS_S:
            self._looked = time.monotonic()
            self._read()

    def _why(self, work: _Work) -> tuple[str, str]:
        if work.pruned:
            return "pruned", work.pruned
        if self.stop_flag.signum:
            return "interrupted", f"stopped by {signal_name(self.stop_flag.signum)}"
        return "", ""

    def _read(self) -> None:
        for name, work in self._work.items():
            rows = work.reader.read()
            if not work.pruned and not self.stop_flag.signum:
                work.pruned = self.sampler.prune_reason(name, reports(rows, self.metric))
                if work.pruned:
                    folder.prune(self.folder, name, work.pruned)
                    work.process.stop()
        self.watch.show_rows({work.process.cell: work.reader.rows for work in self._work.values()})
        self.outcome.now(self._all(), self.forecasts)

    def _end(self, result: CellResult, known: bool) -> None:
        """Records a result, with the measurements in the cell's rows added."""
        rows = RowReader(self.folder / result.cell.name).read()
        result = replace(result, metrics={**result.metrics, **measured(rows)})
        self.results[result.cell.name] = result
        if result.status != "interrupted":
            self.sampler.tell(result, reports(rows, self.metric))
        self.watch.ended(result, known)

    def _all(self) -> tuple[CellResult, ...]:
        """Returns all results; a cell that is the same run as another cell has a copy of its result."""
        out = []
        for result in self.results.values():
            twin = self.results.get(result.same_as)
            if twin is not None:
                result = replace(twin, cell=result.cell, same_as=twin.cell.name)
            out.append(result)
        return tuple(sorted(out, key=lambda r: int(r.cell.name.partition("-")[0])))
