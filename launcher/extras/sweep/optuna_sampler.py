"""Lets optuna propose cells, based on the results of earlier ones.

The same seed gives the same proposals. Each one has its own random stream and knows the results of a fixed
number of cells, in whatever order they end. So a resumed sweep replays the known results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from launcher.errors import RequestError
from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.metrics_rows import Reports
from launcher.extras.sweep.ranking import value
from launcher.extras.sweep.requests import CheckedCell, SweepRequest, check, reason
from launcher.job import sweep_grid
from launcher.job.schema import redact
from launcher.job.schema.search import Sweep
from launcher.job.sweep_grid import Cell, SweepAxis

IDLE = 50
"""The number of proposals in a row that cannot run, or already ran, after which the sampler stops."""
STREAMS = 1 << 20
"""Random streams per seed of a sweep; each proposal has its own."""


@dataclass
class _Trial:
    """A proposal, and the results so far of its ``cells``."""

    optuna: optuna.Trial
    cells: tuple[str, ...] = ()
    results: dict[str, CellResult] = field(default_factory=dict)
    reports: Reports = ()
    pruned: bool = False

    @property
    def complete(self) -> bool:
        return len(self.results) == len(self.cells)


class OptunaSampler:
    """Proposes cells.

    ``named`` names cells. ``known``: the overrides of existing cells, in order. ``window``: the maximum
    number of proposals that are waiting for results.
    """

    def __init__(
        self,
        sweep_request: SweepRequest,
        metric: str,
        named: Callable[[Sequence[Cell]], tuple[Cell, ...]],
        known: Sequence[Sequence[str]],
        window: int,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._request, self._settings, self._metric = sweep_request, sweep_request.settings, metric
        self._named, self._window = named, window
        least = self._settings.goal == "min"
        self._study = optuna.create_study(
            direction="minimize" if least else "maximize", pruner=_pruner(sweep_request)
        )
        self._space = {axis.key: _distribution(axis) for axis in sweep_request.axes if axis.varies}
        self._known = deque(_params(sweep_request.axes, known))
        self._trials: list[_Trial] = []
        self._reported = self._counted = self._idle = 0
        self._repeats: deque[CheckedCell] = deque()
        self._seen: set[str] = set()
        self.size = self._settings.cells and self._settings.cells * self._settings.seeds

    @property
    def finished(self) -> bool:
        most = self._settings.cells
        enough = most is not None and self._counted >= most
        return not self._repeats and (enough or self._idle >= IDLE)

    def ask(self) -> CheckedCell | None:
        while not self._repeats and not self.finished:
            if len(self._trials) - self._reported >= self._window:
                return None
            self._propose()
        return self._repeats.popleft() if self._repeats else None

    def tell(self, result: CellResult, reports: Reports) -> None:
        trial = self._of(result.cell.name)
        trial.results[result.cell.name] = result
        self._report(trial, reports)
        self._learn()

    def prune_reason(self, name: str, reports: Reports) -> str:
        trial = self._of(name)
        self._report(trial, reports)
        if not trial.pruned:
            return ""
        step, last = trial.reports[-1]
        return f"{self._metric} {last:.6g} at step {step} is worse than in other cells"

    def _of(self, name: str) -> _Trial:
        return next(trial for trial in self._trials if name in trial.cells)

    def _propose(self) -> None:
        """Makes a proposal.

        A proposal that cannot run becomes a refused cell. A proposal that already ran does not run again:
        it is reported to Optuna as failed.
        """
        number = len(self._trials)
        if self._known:
            self._study.enqueue_trial(self._known.popleft())
        self._study.sampler = _sampler(self._settings, number)
        trial = _Trial(self._study.ask(self._space))
        self._trials.append(trial)

        one = self._cell(number, trial.optuna.params)
        try:
            request = self._request.compose(one)
            seeds = [request.job.seed + n for n in range(self._settings.seeds)]
            made = sweep_grid.repeated(one, seeds)
            first = check(self._request.compose(made[0]))
        except RequestError as error:
            self._idle += 1
            self._queue_refused(trial, one, reason(error, self._request.words))
            return
        if first is not None and first.digest in self._seen:
            self._idle += 1
            self._learn()
            return
        self._idle = 0
        self._counted += 1
        self._seen |= {first.digest} if first is not None else set()
        cells = self._named(made)
        trial.cells = tuple(cell.name for cell in cells)
        for cell, seed in zip(cells, seeds, strict=True):
            self._repeats.append(CheckedCell(cell, first and replace(first, digest=f"{first.digest}-{seed}")))

    def _queue_refused(self, trial: _Trial, one: Cell, why: str) -> None:
        (cell,) = self._named((one,))
        trial.cells = (cell.name,)
        self._repeats.append(CheckedCell(cell, refused=why))

    def _cell(self, number: int, params: Mapping[str, Any]) -> Cell:
        words = tuple(_word(axis, params) for axis in self._request.axes)
        varied = tuple(w for w, axis in zip(words, self._request.axes, strict=True) if axis.varies)
        return sweep_grid.cell(number, words, varied)

    def _report(self, trial: _Trial, reports: Reports) -> None:
        """Reports new values to optuna, up to the first that prunes the trial."""
        if self._settings.prune is None:
            return
        for step, reported in reports[len(trial.reports) :]:
            if trial.pruned:
                return
            trial.optuna.report(reported, step)
            trial.reports = (*trial.reports, (step, reported))
            trial.pruned = trial.optuna.should_prune()

    def _learn(self) -> None:
        """Tells optuna the results of complete trials, in the order of proposals."""
        while self._reported < len(self._trials) and self._trials[self._reported].complete:
            self._tell(self._trials[self._reported])
            self._reported += 1

    def _tell(self, trial: _Trial) -> None:
        values = [value(result, self._metric) for result in trial.results.values()]
        numbers = [number for number in values if number is not None]
        if trial.pruned:
            self._study.tell(trial.optuna, state=TrialState.PRUNED)
        elif numbers and len(numbers) == len(trial.cells):
            self._study.tell(trial.optuna, fmean(numbers))
        else:
            self._study.tell(trial.optuna, state=TrialState.FAIL)


def _sampler(settings: Sweep, number: int) -> optuna.samplers.BaseSampler:
    seed = settings.seed * STREAMS + number
    if settings.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed)


def _pruner(sweep_request: SweepRequest) -> optuna.pruners.BasePruner:
    if sweep_request.settings.prune == "asha":
        first = sweep_request.first.job.train.eval_every or 1
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first)
    return optuna.pruners.MedianPruner() if sweep_request.settings.prune else optuna.pruners.NopPruner()


def _distribution(axis: SweepAxis) -> BaseDistribution:
    interval = axis.interval
    if interval is None:
        return CategoricalDistribution(axis.words)
    if interval.integers:
        return IntDistribution(int(interval.low), int(interval.high), log=interval.log)
    return FloatDistribution(interval.low, interval.high, log=interval.log)


def _word(axis: SweepAxis, params: Mapping[str, Any]) -> str:
    if not axis.varies:
        return axis.words[0]
    value = params[axis.key]
    return str(value) if axis.interval is None else axis.word(value)


def _params(axes: Sequence[SweepAxis], known: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Yields the parameters of each earlier proposal of this sweep, without repeats for other seeds."""
    last: dict[str, Any] | None = None
    for words in known:
        params = _param(axes, words)
        if params is not None and params != last:
            yield params
        last = params


def _param(axes: Sequence[SweepAxis], words: Sequence[str]) -> dict[str, Any] | None:
    """Returns the parameters that ``words`` set; ``None`` if they belong to another sweep."""
    params: dict[str, Any] = {}
    for axis, word in zip(axes, words, strict=False):
        if axis.interval is not None:
            key, _, value = word.partition("=")
            try:
                number = int(value) if axis.interval.integers else float(value)
            except ValueError:
                return None
            if key != axis.key or not axis.interval.low <= number <= axis.interval.high:
                return None
            params[axis.key] = number
        else:
            same = [w for w in axis.words if redact.identity(w) == word]
            if not same:
                return None
            params |= {axis.key: same[0]} if axis.varies else {}
    return params if len(words) >= len(axes) else None
