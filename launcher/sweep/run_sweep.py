"""A sweep from its checks to its summary, cell by cell."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.errors import Problem, RequestError
from launcher.job.args import Args
from launcher.job.compose import BadRequest, Request, late
from launcher.job.overrides.grammar import shell
from launcher.job.schema import redact
from launcher.job.sweep_grid import Cell
from launcher.runtime.cluster import launch_env
from launcher.runtime.faults import Preempted
from launcher.runtime.preemption import StopFlag, heard
from launcher.sweep import cell_process
from launcher.sweep.cell_process import CellResult
from launcher.sweep.folder import open_folder, write_index
from launcher.sweep.requests import composed, impossible, reason, together
from launcher.sweep.summary import summarize

Refused = Mapping[tuple[str, ...], str]
"""Why a cell cannot run, by its overrides."""


def sweep(args: Args, rank: int | None, command: Sequence[str] = (sys.executable, "-m", "launcher")) -> int:
    """Check every cell, then run those that are not done; 1 if any failed.

    Raises ``RequestError`` before any runs.
    """
    _refuse_outer_launcher(args, rank)
    requests = composed(args)
    if all(r.job.show is not None for r in requests.values()):
        return _show(requests)

    # what can be refused is refused before any runs
    wrong = impossible(requests)
    if len(wrong) == len(requests):
        raise together(wrong)
    refused = {cell.overrides: reason(error, args.overrides) for cell, error in wrong.items()}

    # the folder of the sweep, with one for each cell
    folder = open_folder(args.sweep_dir, [*requests])
    cells = write_index(folder, [*requests])
    _announce(cells, refused)

    # the cells, one after another
    flags = () if args.config_dir is None else ("--config-dir", str(args.config_dir))
    with heard() as told:
        results = [*_run_cells(folder, cells, refused, command=(*command, *flags), told=told)]
    summarize(folder, results)
    if told.signum:
        return Preempted(told.signum).code
    return int(any(r.status != "done" for r in results))


def check(args: Args, planned: bool) -> None:
    """Raises ``RequestError`` with the problems of all cells; plans only if ``planned``."""
    _refuse_outer_launcher(args, launch_env.rank())
    if wrong := impossible(composed(args), planned):
        raise together(wrong)


def _refuse_outer_launcher(args: Args, rank: int | None) -> None:
    if rank is not None:
        text = "a sweep cannot run under torchrun or srun (RANK is set): each cell starts its own ranks"
        words = " ".join(shell(redact.text(o)) for o in args.overrides)
        raise RequestError((Problem("", f"-m: {text}; outside: python -m launcher -m {words}"),))


def _show(requests: Mapping[Cell, Request]) -> int:
    """What each cell prints; nothing is started, nothing written. Raises ``RequestError`` when none can."""
    errors: dict[Cell, BadRequest] = {}
    for cell, request in requests.items():
        print(f"[{cell.name}] {' '.join(redact.text(v) for v in cell.varied)}", flush=True)
        try:
            print(_shown(request), flush=True)
        except RequestError as error:
            errors[cell] = late(error, request)
            print(f"  cannot run: {reason(error, cell.overrides)}", flush=True)
    if errors and len(errors) == len(requests):
        raise together(errors)
    return int(bool(errors))


def _shown(request: Request) -> str:
    from launcher.job.cures.report import as_yaml
    from launcher.run.show import shown

    if request.job.show == "config":
        return as_yaml(request.data)
    return "\n".join(shown(request.job, request.overrides))


def _announce(cells: Sequence[Cell], refused: Refused) -> None:
    if refused:
        print(f"{len(refused)} of {len(cells)} cells cannot run, the others do:", flush=True)
    for cell in cells:
        if cell.overrides in refused:
            print(f"  {cell.name}: {refused[cell.overrides]}", flush=True)


def _run_cells(
    folder: Path, cells: Sequence[Cell], refused: Refused, command: Sequence[str], told: StopFlag
) -> Iterator[CellResult]:
    """What came of each cell; none is begun after a signal that asks to stop."""
    for k, cell in enumerate(cells, 1):
        label = f"[{k}/{len(cells)}] {cell.name}"

        # known already, or to be run now
        done = cell_process.known_result(folder, cell)
        if done is not None and done.status == "done":
            print(f"{label}: already done", flush=True)
            yield done
        elif cell.overrides in refused:
            yield CellResult(cell, "refused", error=refused[cell.overrides])
        else:
            print(f"{label}: running, log in {folder / cell.name}.log", flush=True)
            result = cell_process.run(folder, cell, command, told)
            why = f": {result.error}" if result.error else ""
            print(f"{label}: {result.status} after {result.seconds:.1f} s{why}", flush=True)
            yield result

        if told.signum:
            return
