"""Composes and checks the cells of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import Problem, RequestError, refuse
from launcher.extras.sweep.forecast import Forecast, forecast
from launcher.job import sweep_grid
from launcher.job.args import Args
from launcher.job.compose import BadRequest, Request, compose, late
from launcher.job.config_folders import ConfigFiles
from launcher.job.origins import Origins
from launcher.job.overrides import shell
from launcher.job.schema import redact
from launcher.job.schema.job import Job
from launcher.job.schema.objective import figure
from launcher.job.schema.search import GRID, Sweep
from launcher.job.sweep_grid import OWN, Cell, SweepAxis
from launcher.optional import install_command
from launcher.plan.verbs import trains
from launcher.run import submit_to_cluster

MEASURED = ("step_ms", "tokens_per_s", "samples_per_s", "memory_mb")
"""Measurements in the rows of a run and in its result."""


def intervals(settings: Sweep, axes: Sequence[SweepAxis]) -> Iterator[Problem]:
    """Reports intervals in a grid, which would have infinitely many cells."""
    for axis in axes:
        if axis.interval is not None and settings.sampler == GRID:
            key, _, shown = axis.words[0].lstrip("+").partition("=")
            text = f"{shown}: a grid needs a list of values, as in {key}=A,B; only samplers take intervals"
            yield Problem(key, text, "sweep.sampler=tpe sweep.cells=20")


def problems(settings: Sweep, axes: Sequence[SweepAxis], jobs: Sequence[Job]) -> Iterator[Problem]:
    """Yields problems of a sweep's settings. ``jobs``: those of the cells that are known before any runs."""
    if settings.sampler != GRID:
        yield from _sampler(settings, axes)
    else:
        if settings.cells is not None:
            text = f"{settings.cells}: only for samplers; a grid runs every combination"
            yield Problem("sweep.cells", text, "sweep.sampler=tpe")
        if settings.prune is not None:
            text = f"{settings.prune}: only for samplers; a grid runs every cell to its end"
            yield Problem("sweep.prune", text)
    if settings.seeds > 1 and any(axis.varies and axis.key.lstrip("+") == "seed" for axis in axes):
        yield Problem("sweep.seeds", f"{settings.seeds}: seed already has several values")
    if settings.certify and not any(trains(job) for job in jobs):
        yield Problem("sweep.certify", "true: no cell trains, so there are no losses to compare")
    yield from _metric(settings, jobs)
    yield from _prune(settings, jobs)
    yield from _elsewhere(settings, jobs)


def metric(settings: Sweep, jobs: Sequence[Job]) -> str:
    """Returns the metric by which cells are sorted."""
    if settings.metric is not None:
        return settings.metric
    return "val_loss" if any(_validates(job) for job in jobs) else "loss"


def _sampler(settings: Sweep, axes: Sequence[SweepAxis]) -> Iterator[Problem]:
    key = "sweep.sampler"
    if find_spec("optuna") is None:
        text = f"{settings.sampler}: optuna is not installed: {install_command('optuna')}"
        yield Problem(key, text)
    if not any(axis.varies for axis in axes):
        text = f"{settings.sampler}: no key varies; give one a list, A,B, or an interval, interval(LOW, HIGH)"
        yield Problem(key, text)
    if settings.cells is None and settings.minutes is None:
        text = "null: set how many cells the sampler proposes, or set sweep.minutes"
        yield Problem("sweep.cells", text, "sweep.cells=20")


def _metric(settings: Sweep, jobs: Sequence[Job]) -> Iterator[Problem]:
    """Reports a metric that no cell reports."""
    if settings.metric is None:
        return
    known = [*MEASURED, "seconds"]
    if any(trains(job) for job in jobs):
        known.append("loss")
    for job in jobs:
        if _validates(job):
            known += ["val_loss", *(f"val_{figure(one)}" for one in job.metrics)]
    if settings.metric in known:
        return
    available = ", ".join(dict.fromkeys(reversed(known)))
    close = get_close_matches(settings.metric, known, 1)
    cure = f"sweep.metric={close[0]}" if close else ""
    yield Problem("sweep.metric", f"{settings.metric}: no cell reports it; use one of {available}", cure)


def _prune(settings: Sweep, jobs: Sequence[Job]) -> Iterator[Problem]:
    if settings.prune is None:
        return
    if settings.seeds > 1:
        text = f"{settings.seeds}: sweep.prune judges a cell by its only run, but each cell has several"
        yield Problem("sweep.seeds", text, "sweep.seeds=1")
    by = metric(settings, jobs)
    if by in (*MEASURED, "seconds"):
        text = f"{settings.prune}: needs a loss or a metric of the model, and {by} is neither"
        yield Problem("sweep.prune", text)
    elif by != "loss" and not any(job.train.eval_every for job in jobs):
        steps = min((job.train.steps or 10 for job in jobs), default=10)
        text = f"{settings.prune}: needs {by} during training, but no validation runs then"
        yield Problem("sweep.prune", text, f"train.eval_every={max(1, steps // 10)}")


def _elsewhere(settings: Sweep, jobs: Sequence[Job]) -> Iterator[Problem]:
    """Reports settings that do not work for cells on a cluster."""
    keys = dict.fromkeys(submit_to_cluster.key(job) for job in jobs)
    key = next((key for key in keys if key is not None), None)
    if key is None:
        return
    if len(keys) > 1:
        text = "only some cells set it; all cells of a sweep must run in the same place"
        yield Problem(key, text)
    if "launch.k8s" in keys:
        text = "cells of a sweep cannot be Kubernetes jobs; start each as a separate run"
        yield Problem("launch.k8s", text)
    if settings.sampler != GRID:
        text = f"{settings.sampler}: needs the results of earlier cells, which a cluster reports too late"
        yield Problem("sweep.sampler", f"{text}; use launch=auto inside an allocation")


def _validates(job: Job) -> bool:
    evaluates = any(step.kind == "evaluate" for step in job.steps.values())
    return evaluates or (trains(job) and job.train.eval_every is not None)


@dataclass(frozen=True)
class SweepRequest:
    """A checked request for a sweep.

    ``axes``: those of the cells; ``own``: overrides of the sweep itself, not passed to the cells' processes.

    ``words``: the command line. ``cells``: the composed cells of a grid, or those at the ends of a sampler's
    axes.
    """

    words: tuple[str, ...]
    config_dir: Path | None
    axes: tuple[SweepAxis, ...]
    own: tuple[str, ...]
    cells: Mapping[Cell, Request]

    @property
    def first(self) -> Request:
        return next(iter(self.cells.values()))

    @property
    def settings(self) -> Sweep:
        return self.first.job.sweep

    def compose(self, cell: Cell) -> Request:
        """Composes the request of ``cell``. Raises ``BadRequest``."""
        return compose((*self.own, *cell.overrides), config_dir=self.config_dir)


@dataclass(frozen=True)
class CheckedCell:
    """A cell with its forecast, or the reason why it is ``refused``."""

    cell: Cell
    forecast: Forecast | None = None
    refused: str = ""


def composed(args: Args) -> SweepRequest:
    """Composes the sweep. Raises ``RequestError`` with each problem once, whichever cells have it."""
    configs = ConfigFiles.from_folders(args.config_dir)
    all_axes = sweep_grid.axes(args.overrides, configs)
    own = tuple(axis for axis in all_axes if axis.key.lstrip("+").startswith(OWN))
    refuse([_one_value(axis) for axis in own if axis.varies])
    typed = tuple(axis for axis in all_axes if axis not in own)
    words = tuple(word for axis in own for word in axis.words)
    probe = SweepRequest(args.overrides, args.config_dir, typed, words, {})

    # a cell that can be composed shows the other axes and the sampler
    first = Cell("0", tuple(axis.ends[0] for axis in typed), ())
    try:
        request = probe.compose(first)
    except BadRequest:
        _composed(probe, tuple(_ends(typed)), args)  # others may have problems, too
        raise
    settings = request.job.sweep
    try:
        axes = (*typed, *sweep_grid.written_axes(settings.over, typed, configs))
    except RequestError as error:
        raise BadRequest(error.problems, request.origins) from error
    refuse([*intervals(settings, axes)])
    cells = sweep_grid.grid(axes) if settings.sampler == GRID else tuple(_ends(axes))
    sweep_request = SweepRequest(args.overrides, args.config_dir, axes, words, _composed(probe, cells, args))
    wrong = [*problems(sweep_request.settings, axes, [r.job for r in sweep_request.cells.values()])]
    if wrong:
        raise BadRequest(tuple(wrong), sweep_request.first.origins)
    return sweep_request


def _composed(sweep_request: SweepRequest, cells: Sequence[Cell], args: Args) -> dict[Cell, Request]:
    errors: dict[Cell, BadRequest] = {}
    out: dict[Cell, Request] = {}
    for cell in cells:
        try:
            request = sweep_request.compose(cell)
        except BadRequest as error:
            errors[cell] = error
            continue

        out[cell] = request
        if request.job.run_dir is not None:
            errors[cell] = BadRequest((_own_folder(request.job.run_dir, args),), request.origins)
    if errors:
        raise together(errors)
    return out


def _ends(axes: Sequence[SweepAxis]) -> Iterator[Cell]:
    """Yields a cell for each listed value and each end of an interval; other axes have their first value."""
    first = tuple(axis.ends[0] for axis in axes)
    yield sweep_grid.cell(0, first, ())
    for i, axis in enumerate(axes):
        for word in axis.ends[1:]:
            yield sweep_grid.cell(0, (*first[:i], word, *first[i + 1 :]), (word,))


def _one_value(axis: SweepAxis) -> Problem:
    """Returns the problem of a setting of the sweep itself that has several values."""
    key = axis.key.lstrip("+")
    shown = ",".join(word.partition("=")[2] for word in axis.words)
    return Problem(key, f"{shown}: all cells share one {key}; give one value", axis.words[0])


def _own_folder(run_dir: str, args: Args) -> Problem:
    typed = tuple(o for o in args.overrides if o.lstrip("+").startswith("run_dir="))[-1:]
    cure = shell(f"sweep_dir={run_dir}") if typed else ""
    return Problem("run_dir", f"{run_dir}: a sweep gives each cell its own folder", cure, typed)


def check(request: Request) -> Forecast | None:
    """Returns the forecast of the request's plan.

    Raises ``BadRequest`` if the request would be refused in a run.
    """
    from launcher.run.run import rehearse

    try:
        plan = rehearse(request)
        return None if plan is None else forecast(request.job, plan)
    except RequestError as error:
        raise late(error, request) from error


def impossible(requests: Mapping[Cell, Request], planned: bool) -> dict[Cell, BadRequest]:
    """Returns the cells that would be refused when they run, with the reason."""
    from launcher.run.run import rehearse

    out = {}
    for cell, request in requests.items():
        try:
            rehearse(request, planned)
        except RequestError as error:
            out[cell] = late(error, request)
    return out


def together(errors: Mapping[Cell, BadRequest]) -> BadRequest:
    """Returns one error with each problem once, whichever cells have it."""
    places: dict[Problem, Origins] = {}
    for error in errors.values():
        origins = error.origins if isinstance(error.origins, Origins) else Origins()
        places.update({p: origins for p in error.problems if p not in places})
    late = all(e.late for e in errors.values())
    planned = any(e.planned for e in errors.values())
    return BadRequest(tuple(places), places, late, planned)


def reason(error: RequestError, words: Sequence[str]) -> str:
    """Returns the problems in one line, without the secrets of the command line ``words``."""
    text = "; ".join(f"{p.key}: {p.text}" if p.key else p.text for p in error.problems)
    return redact.hide(text, redact.typed(words))
