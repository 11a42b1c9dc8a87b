"""Composes, checks and plans the requests of a sweep: its own settings, its axes, and each cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, RequestError, refuse
from launcher.job import sweep_grid
from launcher.job.args import Args
from launcher.job.compose import BadRequest, Request, compose, late
from launcher.job.overrides.grammar import shell
from launcher.job.schema import redact
from launcher.job.schema.sweep import GRID, Sweep
from launcher.job.sweep_grid import OWN, Axis, Cell
from launcher.job.yaml.config_files import ConfigFiles
from launcher.job.yaml.origins import Origins
from launcher.sweep import settings
from launcher.sweep.forecast import Forecast, forecast


@dataclass(frozen=True)
class SweepRequest:
    """``axes``: those of the cells; ``own``: settings of the sweep itself, which cells do not get.

    ``words``: the command line. ``cells``: the composed cells of a grid, or those at the ends of a sampler's
    axes.
    """

    words: tuple[str, ...]
    config_dir: Path | None
    axes: tuple[Axis, ...]
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
class Checked:
    """A cell with its forecast, or the reason why it is ``refused``."""

    cell: Cell
    forecast: Forecast | None = None
    refused: str = ""


def composed(args: Args) -> SweepRequest:
    """Composes the sweep. Raises ``RequestError`` with each problem once, whichever cells have it."""
    configs = ConfigFiles.of(args.config_dir)
    given = sweep_grid.axes(args.overrides, configs)
    own = tuple(axis for axis in given if axis.key.lstrip("+").startswith(OWN))
    refuse([_one_value(axis) for axis in own if axis.varies])
    typed = tuple(axis for axis in given if axis not in own)
    words = tuple(word for axis in own for word in axis.words)
    probe = SweepRequest(args.overrides, args.config_dir, typed, words, {})

    # a cell that can be composed shows the other axes and the sampler
    first = Cell("0", tuple(axis.ends[0] for axis in typed), ())
    try:
        request = probe.compose(first)
    except BadRequest:
        _composed(probe, tuple(_ends(typed)), args)  # others may have problems, too
        raise
    asked = request.job.sweep
    try:
        axes = (*typed, *sweep_grid.written_axes(asked.over, typed, configs))
    except RequestError as error:
        raise BadRequest(error.problems, request.origins) from error
    refuse([*settings.intervals(asked, axes)])
    cells = sweep_grid.grid(axes) if asked.sampler == GRID else tuple(_ends(axes))
    found = SweepRequest(args.overrides, args.config_dir, axes, words, _composed(probe, cells, args))
    wrong = [*settings.refused(found.settings, axes, [r.job for r in found.cells.values()])]
    if wrong:
        raise BadRequest(tuple(wrong), found.first.origins)
    return found


def _composed(asked: SweepRequest, cells: Sequence[Cell], args: Args) -> dict[Cell, Request]:
    errors: dict[Cell, BadRequest] = {}
    out: dict[Cell, Request] = {}
    for cell in cells:
        try:
            request = asked.compose(cell)
        except BadRequest as error:
            errors[cell] = error
            continue

        out[cell] = request
        if request.job.run_dir is not None:
            errors[cell] = BadRequest((_own_folder(request.job.run_dir, args),), request.origins)
    if errors:
        raise together(errors)
    return out


def _ends(axes: Sequence[Axis]) -> Iterator[Cell]:
    """Yields a cell for each listed value and each end of an interval; other axes have their first value."""
    first = tuple(axis.ends[0] for axis in axes)
    yield sweep_grid.cell(0, first, ())
    for i, axis in enumerate(axes):
        for word in axis.ends[1:]:
            yield sweep_grid.cell(0, (*first[:i], word, *first[i + 1 :]), (word,))


def _one_value(axis: Axis) -> Problem:
    """The problem of a setting of the sweep itself that has several values."""
    key = axis.key.lstrip("+")
    shown = ",".join(word.partition("=")[2] for word in axis.words)
    return Problem(key, f"{shown}: cells differ in other settings; a sweep has one {key}", axis.words[0])


def _own_folder(run_dir: str, args: Args) -> Problem:
    typed = tuple(o for o in args.overrides if o.lstrip("+").startswith("run_dir="))[-1:]
    cure = shell(f"sweep_dir={run_dir}") if typed else ""
    return Problem("run_dir", f"{run_dir}: a sweep gives each cell its own folder", cure, typed)


def check(request: Request) -> Forecast | None:
    """The forecast of its plan. Raises ``BadRequest`` if the request would be refused when it runs."""
    from launcher.run.run_job import rehearse

    try:
        plan = rehearse(request)
        return None if plan is None else forecast(request.job, plan)
    except RequestError as error:
        raise late(error, request) from error


def impossible(requests: Mapping[Cell, Request], planned: bool) -> dict[Cell, BadRequest]:
    """The cells that would be refused when they run, with the reason."""
    from launcher.run.run_job import rehearse

    out = {}
    for cell, request in requests.items():
        try:
            rehearse(request, planned)
        except RequestError as error:
            out[cell] = late(error, request)
    return out


def together(errors: Mapping[Cell, BadRequest]) -> BadRequest:
    """One error with each problem once, whichever cells have it."""
    places: dict[Problem, Origins] = {}
    for error in errors.values():
        origins = error.origins if isinstance(error.origins, Origins) else Origins()
        places.update({p: origins for p in error.problems if p not in places})
    late = all(e.late for e in errors.values())
    planned = any(e.planned for e in errors.values())
    return BadRequest(tuple(places), places, late, planned)


def reason(error: RequestError, words: Sequence[str]) -> str:
    """The problems in one line, without the secrets of the command line ``words``."""
    said = "; ".join(f"{p.key}: {p.text}" if p.key else p.text for p in error.problems)
    return redact.hide(said, redact.typed(words))
