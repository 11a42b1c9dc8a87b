"""Runs a sweep from its checks to its summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from launcher.errors import Problem, RequestError
from launcher.extras.sweep import cluster_cells, folder, requests
from launcher.extras.sweep.requests import CheckedCell, SweepRequest, composed, impossible, reason, together
from launcher.extras.sweep.results_writer import ResultsWriter
from launcher.extras.sweep.run_cells import CellRuns
from launcher.extras.sweep.sampler import GridSampler, Sampler
from launcher.extras.sweep.slots import Slots, machine, side_by_side
from launcher.extras.sweep.summary import Watch, planned, reasons
from launcher.job import sweep_grid
from launcher.job.args import Args
from launcher.job.compose import BadRequest, Depth, Request, late
from launcher.job.overrides import shell, written
from launcher.job.schema import redact
from launcher.job.schema.search import GRID
from launcher.job.sweep_grid import Cell
from launcher.run import submit_to_cluster
from launcher.runtime.cluster import launch_env
from launcher.runtime.faults import Preempted
from launcher.runtime.run_folder import locked, running_launcher
from launcher.runtime.signals import heard


def sweep(args: Args, rank: int | None, command: Sequence[str] = (sys.executable, "-m", "launcher")) -> int:
    """Checks every known cell, then runs those that are not done; returns 1 if any failed.

    Raises ``RequestError`` before any cell runs.
    """
    _refuse_outer_launcher(args, rank)
    sweep_request = composed(args)
    if all(r.job.show is not None for r in sweep_request.cells.values()):
        return _show(sweep_request.cells)

    # refuse what can be refused before any cell runs
    checked = _checked(sweep_request)
    if sweep_request.settings.plan:
        print("\n".join(planned(checked)), flush=True)
        return 0

    cluster_cells.refuse_long_array(sweep_request, checked)

    # the folder of the sweep, with a folder per cell
    at = folder.open_folder(args.sweep_dir, sweep_request.words)
    with _alone(at):
        if submit_to_cluster.key(sweep_request.first.job) is not None:
            return _hand_over(sweep_request, checked, at)
        return _run(sweep_request, checked, at, _command(args, command))


def check(args: Args, depth: Depth | None) -> None:
    """Raises ``RequestError`` with the problems of all cells, checked as deep as ``depth``."""
    _refuse_outer_launcher(args, launch_env.rank())
    cells = composed(args).cells
    if depth == Depth.COMPOSED:
        return
    if wrong := impossible(cells, depth != Depth.SETTLED):
        raise together(wrong)


def _checked(sweep_request: SweepRequest) -> tuple[CheckedCell, ...]:
    """Plans all cells of a grid, or those at the ends of a sampler's axes. Raises if none can run."""
    out: list[CheckedCell] = []
    wrong: dict[Cell, BadRequest] = {}
    for one, request in sweep_request.cells.items():
        seeds = [request.job.seed + n for n in range(request.job.sweep.seeds)]
        for cell in sweep_grid.repeated(one, seeds):
            try:
                again = request if cell is one else sweep_request.compose(cell)
                out.append(CheckedCell(cell, requests.check(again)))
            except BadRequest as error:
                wrong[cell] = error
                out.append(CheckedCell(cell, refused=reason(error, sweep_request.words)))
    if len(wrong) == len(out):
        raise together(wrong)
    return tuple(out)


def _run(
    sweep_request: SweepRequest, checked: Sequence[CheckedCell], at: Path, command: Sequence[str]
) -> int:
    settings = sweep_request.settings
    metric = requests.metric(settings, [r.job for r in sweep_request.cells.values()])
    slots = Slots(machine(), side_by_side(settings, metric))
    sampler = _sampler(sweep_request, checked, at, metric, slots)
    deadline = None if settings.minutes is None else time.monotonic() + 60 * settings.minutes

    outcome = ResultsWriter(at, sweep_request, metric)
    with heard() as stop_flag, Watch(sampler.size) as watch:
        runs = CellRuns(at, sampler, slots, command, metric, stop_flag, watch, outcome, deadline)
        done = runs.run()
    right = outcome.end(done, runs.forecasts, missing=runs.missing)
    if stop_flag.signum:
        return Preempted(stop_flag.signum).code
    return int(not right or any(r.status in _wrong(sweep_request) for r in done))


def _hand_over(sweep_request: SweepRequest, checked: Sequence[CheckedCell], at: Path) -> int:
    """Hands cells over to a cluster; reports the results of those that it has already run."""
    metric = requests.metric(sweep_request.settings, [r.job for r in sweep_request.cells.values()])
    cell_results = cluster_cells.submitted(sweep_request, at, _named(sweep_request, checked, at))
    forecasts = {one.cell.name: one.forecast for one in checked if one.forecast is not None}
    right = ResultsWriter(at, sweep_request, metric).end(cell_results, forecasts)
    return int(not right or any(r.status in _wrong(sweep_request) for r in cell_results))


def _folders(sweep_request: SweepRequest, at: Path, cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Names the folders of ``cells``. Raises ``BadRequest`` if one has run another request there.

    The words of a cell may be the same, and the recipe's file edited since.
    """
    named = folder.named(at, cells)
    for cell in named:
        if not (at / cell.name / "config.yaml").is_file():
            continue
        try:
            request = sweep_request.compose(cell)
        except RequestError:  # the cell is refused
            continue
        if (change := folder.edited(at / cell.name, request.job)) is not None:
            key, old, new = change
            ran = f"cell {at / cell.name} has run with {written(old)}"
            text = f"{written(new)}: {ran}; its result is of another request"
            raise late(RequestError((Problem(key, text, folder.another(at)),)), request)
    return named


def _named(sweep_request: SweepRequest, checked: Sequence[CheckedCell], at: Path) -> list[CheckedCell]:
    cells = _folders(sweep_request, at, [one.cell for one in checked])
    named = [CheckedCell(c, o.forecast, o.refused) for c, o in zip(cells, checked, strict=True)]
    _announce(named)
    return named


def _wrong(sweep_request: SweepRequest) -> tuple[str, ...]:
    """Returns the statuses that fail a sweep. A sampler may propose cells that are refused."""
    return ("failed", "interrupted", *(("refused",) if sweep_request.settings.sampler == GRID else ()))


@contextmanager
def _alone(at: Path) -> Iterator[None]:
    """Raises ``RequestError`` while another sweep uses this folder."""
    if busy := running_launcher(at, patience_s=0):
        raise RequestError((Problem("sweep_dir", f"{at}: {busy}"),))
    with locked(at):
        yield


def _sampler(
    sweep_request: SweepRequest, checked: Sequence[CheckedCell], at: Path, metric: str, slots: Slots
) -> Sampler:
    if sweep_request.settings.sampler == GRID:
        return GridSampler(_named(sweep_request, checked, at))
    from launcher.extras.sweep.optuna_sampler import OptunaSampler

    first = next((one.forecast for one in checked if one.forecast is not None), None)
    known = [*folder.known_cells(at).values()]
    window = slots.room(first)
    return OptunaSampler(sweep_request, metric, partial(_folders, sweep_request, at), known, window)


def _command(args: Args, command: Sequence[str]) -> tuple[str, ...]:
    flags = () if args.config_dir is None else ("--config-dir", str(args.config_dir))
    return (*command, *flags)


def _refuse_outer_launcher(args: Args, rank: int | None) -> None:
    if rank is not None:
        text = "a sweep cannot run under torchrun or srun (RANK is set): each cell starts its own ranks"
        words = " ".join(shell(redact.text(o)) for o in args.overrides)
        raise RequestError((Problem("", f"-m: {text}; run it outside: python -m launcher -m {words}"),))


def _show(cells: Mapping[Cell, Request]) -> int:
    """Prints what each cell shows; starts and writes nothing. Raises ``RequestError`` if no cell can."""
    errors: dict[Cell, BadRequest] = {}
    for cell, request in cells.items():
        print(f"[{cell.name}] {' '.join(redact.text(v) for v in cell.varied)}", flush=True)
        try:
            print(_shown(request), flush=True)
        except RequestError as error:
            errors[cell] = late(error, request)
            print(f"  cannot run: {reason(error, cell.overrides)}", flush=True)
    if errors and len(errors) == len(cells):
        raise together(errors)
    return int(bool(errors))


def _shown(request: Request) -> str:
    from launcher.job.cures.report import as_yaml
    from launcher.run.run import shown_lines

    if request.job.show == "config":
        return as_yaml(request.data)
    return "\n".join(shown_lines(request))


def _announce(cells: Sequence[CheckedCell]) -> None:
    refused = sum(bool(one.refused) for one in cells)
    if refused:
        print(f"{refused} of {len(cells)} cells cannot run, the others will:", flush=True)
        print("\n".join(reasons(cells)), flush=True)
