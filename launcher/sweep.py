"""A grid of runs, one process a cell: a cell that fails is recorded, the others go on."""

from __future__ import annotations

import csv
import ctypes
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.errors import REFUSED, Problem, RequestError, said
from launcher.job.args import Args
from launcher.job.compose import BadRequest, Request, compose, late
from launcher.job.overrides.grammar import quoted, shell
from launcher.job.schema import redact
from launcher.job.sweep_grid import Cell, cells
from launcher.job.yaml.config_files import ConfigFiles
from launcher.job.yaml.origins import Origins
from launcher.runtime.cluster import launch_env
from launcher.runtime.faults import Interrupted, Preempted, signal_name
from launcher.runtime.folder import status_of
from launcher.runtime.lock import at_work
from launcher.runtime.preemption import StopFlag, heard
from launcher.untrusted.files import read_json, read_text

INDEX = "sweep.json"
JOB = "job"
LOOK_S = 0.1
SAVE_S = 30.0  # for the cell of a sweep that was killed, which saves and stops
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Result:
    cell: Cell
    status: str
    metrics: dict[str, Any]
    seconds: float
    error: str


def sweep(args: Args, rank: int | None, command: Sequence[str] = (sys.executable, "-m", "launcher")) -> int:
    """Check every cell, then run those that are not done; 1 if any failed.

    Raises ``RequestError`` before any runs.
    """
    _outside(args, rank)
    requests = composed(args)
    if all(r.job.show is not None for r in requests.values()):
        return _show(requests)
    impossible = _impossible(requests)
    if len(impossible) == len(requests):
        raise _together(impossible)
    grid = [*requests]
    folder = args.sweep_dir or _begun(Path("runs/sweeps"), grid) or _new(Path("runs/sweeps"))
    named = _index(folder, grid)
    if job := launch_env.job():
        write_text(folder / JOB, job)
    flags = () if args.config_dir is None else ("--config-dir", str(args.config_dir))
    refused = {
        c.overrides: redact.hide(_reason(e), redact.typed(args.overrides)) for c, e in impossible.items()
    }
    _announce(named, refused)
    results: list[Result] = []
    with heard() as told:
        for k, cell in enumerate(named, 1):
            label = f"[{k}/{len(named)}] {cell.name}"
            done = _done(folder, cell, label) or _left_out(cell, refused)
            results.append(done or _told(folder, cell, (*command, *flags), label, told))
            if told.signum:
                break
    _summary(folder, results)
    if told.signum:
        return Preempted(told.signum).code
    return int(any(r.status != "done" for r in results))


def _outside(args: Args, rank: int | None) -> None:
    if rank is not None:
        text = "a sweep cannot run under torchrun or srun (RANK is set): each cell starts its own ranks"
        words = " ".join(shell(redact.text(o)) for o in args.overrides)
        raise RequestError((Problem("", f"-m: {text}; outside: python -m launcher -m {words}"),))


def check(args: Args, planned: bool) -> None:
    """Raises ``RequestError`` with the problems of all cells; plans only if ``planned``."""
    _outside(args, launch_env.rank())
    if impossible := _impossible(composed(args), planned):
        raise _together(impossible)


def _impossible(requests: Mapping[Cell, Request], planned: bool = True) -> dict[Cell, BadRequest]:
    """The cells that would be refused when their turn came, and why."""
    from launcher.run.run_job import rehearse

    out = {}
    for cell, request in requests.items():
        try:
            rehearse(request, planned)
        except RequestError as error:
            out[cell] = late(error, request)
    return out


def _together(errors: Mapping[Cell, BadRequest]) -> BadRequest:
    """Each problem once, whichever cell has it."""
    places: dict[Problem, Origins] = {}
    for error in errors.values():
        origins = error.origins if isinstance(error.origins, Origins) else Origins()
        places.update({p: origins for p in error.problems if p not in places})
    late, planned = all(e.late for e in errors.values()), any(e.planned for e in errors.values())
    return BadRequest(tuple(places), places, late, planned)


def _reason(error: RequestError) -> str:
    return "; ".join(f"{p.key}: {p.text}" if p.key else p.text for p in error.problems)


def _announce(named: Sequence[Cell], refused: Mapping[tuple[str, ...], str]) -> None:
    if refused:
        print(f"{len(refused)} of {len(named)} cells cannot run, the others do:", flush=True)
    for cell in named:
        if (reason := refused.get(cell.overrides)) is not None:
            print(f"  {cell.name}: {reason}", flush=True)


def _show(requests: Mapping[Cell, Request]) -> int:
    """What each cell prints; nothing is started, nothing written. Raises ``RequestError`` when none can."""
    from launcher.job.cures.report import as_yaml
    from launcher.run.show import shown

    errors: dict[Cell, BadRequest] = {}
    for cell, request in requests.items():
        print(f"[{cell.name}] {' '.join(redact.text(v) for v in cell.varied)}", flush=True)
        try:
            print(
                as_yaml(request.data)
                if request.job.show == "config"
                else "\n".join(shown(request.job, request.overrides)),
                flush=True,
            )
        except RequestError as error:
            errors[cell] = late(error, request)
            print(f"  cannot run: {redact.hide(_reason(error), redact.typed(cell.overrides))}", flush=True)
    if errors and len(errors) == len(requests):
        raise _together(errors)
    return int(bool(errors))


def composed(args: Args) -> dict[Cell, Request]:
    """The cells, each composed. Raises ``RequestError`` with each problem once, whichever cell has it."""
    errors: dict[Cell, BadRequest] = {}
    out: dict[Cell, Request] = {}
    for cell in cells(args.overrides, ConfigFiles.of(args.config_dir)):
        try:
            request = out[cell] = compose(cell.overrides, config_dir=args.config_dir)
        except BadRequest as error:
            errors[cell] = error
            continue
        if request.job.run_dir is not None:
            text = f"{request.job.run_dir}: a sweep gives each cell its own folder"
            cure = shell(f"sweep_dir={request.job.run_dir}")
            typed = tuple(o for o in args.overrides if o.lstrip("+").startswith("run_dir="))[-1:]
            errors[cell] = BadRequest(
                (Problem("run_dir", text, cure if typed else "", typed),), request.origins
            )
    if errors:
        raise _together(errors)
    return out


def _begun(above: Path, grid: Sequence[Cell]) -> Path | None:
    """The folder of this very sweep, if Slurm runs its job again."""
    job, keys = launch_env.job(), {_hidden(cell.overrides) for cell in grid}
    if job is None or not launch_env.again():
        return None
    for place in sorted(above.glob(f"*/{JOB}"), reverse=True):
        try:
            mine = read_text(place) == job
        except (OSError, ValueError):
            continue
        if mine and keys == {tuple(words) for words in _known(place.parent / INDEX).values()}:
            return place.parent
    return None


def _new(above: Path) -> Path:
    """A folder that no other sweep has."""
    _make(above)
    for k in itertools.count(1):
        folder = above / f"{k:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("counting ended")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError((Problem("sweep_dir", f"{folder}: cannot be made: {error.strerror}"),)) from error


def _index(folder: Path, grid: Sequence[Cell]) -> tuple[Cell, ...]:
    """The same overrides keep the folder they had; new ones are numbered on."""
    _make(folder)
    path = folder / INDEX
    known = _known(path)
    names = {tuple(overrides): name for name, overrides in known.items()}
    out = []
    for cell in grid:
        key = _hidden(cell.overrides)
        if key not in names:
            names[key] = f"{len(names)}-{cell.name.partition('-')[2]}".rstrip("-")
        out.append(Cell(names[key], cell.overrides, cell.varied))
    text = json.dumps({name: list(key) for key, name in names.items()}, indent=1)
    write_text(path, text + "\n")
    return tuple(out)


def _known(index: Path) -> dict[str, list[str]]:
    """The overrides of each cell that there is. Raises ``RequestError`` for a file that does not say them."""
    if not os.path.lexists(index):
        return {}
    try:
        known: dict[str, list[str]] = read_json(index)
    except (OSError, ValueError) as error:
        why = said(error) if isinstance(error, OSError) else f"{index}: no JSON"
        raise RequestError((Problem("sweep_dir", why),)) from error
    rows: list[Any] = [*known.values()] if isinstance(known, dict) else [None]
    if not all(isinstance(row, list) and all(isinstance(word, str) for word in row) for row in rows):
        raise RequestError((Problem("sweep_dir", f"{index}: it does not say which overrides each cell has"),))
    return known


def _hidden(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(redact.text(o) for o in overrides if not o.lstrip("+").startswith("run_dir="))


def _result(folder: Path, cell: Cell) -> Result | None:
    """What the cell's own ``status.json`` says; ``None`` when it says nothing about these overrides."""
    try:
        status = status_of(folder / cell.name / "status.json")
    except (OSError, ValueError):
        return None
    if status.get("status") not in ("done", "failed"):
        return None
    if _hidden(status.get("overrides", ())) != _hidden(cell.overrides):
        return None
    error = status.get("error") or ""
    return Result(
        cell,
        status["status"],
        dict(_scalars(status.get("metrics") or {})),
        status.get("seconds") or 0.0,
        str(error),
    )


def _scalars(metrics: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """What fits a column of the table; nested figures by dotted name."""
    for name, value in metrics.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, dict):
            yield from _scalars(value, key)
        elif isinstance(value, int | float | str):
            yield key, value


def _done(folder: Path, cell: Cell, label: str) -> Result | None:
    done = _result(folder, cell)
    if done is None or done.status != "done":
        return None
    print(f"{label}: already done", flush=True)
    return done


def _left_out(cell: Cell, refused: Mapping[tuple[str, ...], str]) -> Result | None:
    reason = refused.get(cell.overrides)
    return None if reason is None else Result(cell, "refused", {}, 0.0, reason)


def _told(folder: Path, cell: Cell, command: Sequence[str], label: str, told: StopFlag) -> Result:
    print(f"{label}: running, log in {folder / cell.name}.log", flush=True)
    done = _run(folder, cell, command, told)
    why = f": {done.error}" if done.error else ""
    print(f"{label}: {done.status} after {done.seconds:.1f} s{why}", flush=True)
    return done


def _run(folder: Path, cell: Cell, command: Sequence[str], told: StopFlag) -> Result:
    """One cell in a process group of its own. It is told to stop when this process is, or dies."""
    if busy := at_work(folder / cell.name, SAVE_S):  # of a sweep that was killed
        return Result(cell, "failed", {}, SAVE_S, busy)
    (folder / cell.name / "status.json").unlink(missing_ok=True)
    run_dir = f"run_dir={quoted(str(folder / cell.name))}"
    began = time.monotonic()
    with (folder / f"{cell.name}.log").open("w", encoding="utf-8") as log:
        child = subprocess.Popen(
            [*command, *cell.overrides, run_dir],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(_dies_with, os.getpid()),
        )
        code = _wait(child, told)
    seconds = time.monotonic() - began
    if told.signum:
        return Result(cell, "interrupted", {}, seconds, f"stopped by {signal_name(told.signum)}")
    said = _result(folder, cell)
    if said is not None and (said.status == "done") == (code == 0):
        return said
    return Result(cell, "failed", {}, seconds, _why(code, folder / f"{cell.name}.log"))


def _dies_with(parent: int) -> None:
    """In the child: when this process dies, however that comes, the cell is told to save and stop."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _wait(child: subprocess.Popen[bytes], told: StopFlag) -> int:
    """The exit code. The first signal that asks to stop is sent on, a second one ends the cell at once."""
    sent = False
    try:
        while (code := _polled(child)) is None:
            if told.signum and not sent:
                child.terminate()
                sent = True
        return code
    except Interrupted:
        os.killpg(child.pid, signal.SIGKILL)
        return child.wait()


def _polled(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return None


def _why(code: int, log: Path) -> str:
    """Of a request that is refused the first problem, else the last line."""
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    at = next(
        (i for i, line in enumerate(lines) if line.startswith("error: ") and "in this request" in line), None
    )
    if code == REFUSED and at is not None and at + 1 < len(lines):
        return lines[at + 1]
    return f"exit code {code}: {lines[-1][:200] if lines else 'no output'}"


def _summary(folder: Path, results: Sequence[Result]) -> None:
    """``summary.csv`` with every metric, and a table of the same on the console."""
    metrics = list(dict.fromkeys(k for r in results for k in r.metrics))
    head = ["cell", "overrides", "status", *metrics, "seconds", "error"]
    rows = [list(_row(r, metrics)) for r in results]
    table = io.StringIO(newline="")
    csv.writer(table).writerows([head, *rows])
    write_text(folder / "summary.csv", table.getvalue())
    _print_table(head, rows)
    failed = sum(r.status != "done" for r in results)
    again = f"; to run those again: -m sweep_dir={folder} and the same overrides" if failed else ""
    print(f"{len(results) - failed} of {len(results)} done, {folder / 'summary.csv'}{again}")


def _print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns that say something; a narrow terminal folds what does not fit, a file gets whole lines."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    shown = [i for i in range(len(head)) if any(row[i] != "" for row in rows)]
    table = Table(*(Column(head[i], overflow="fold") for i in shown), box=box.SIMPLE)
    for row in rows:
        table.add_row(*(Text(f"{row[i]:.4g}" if isinstance(row[i], float) else str(row[i])) for i in shown))
    console = Console()
    if not console.is_terminal:
        console.width = console.measure(table, options=console.options.update_width(10_000)).maximum
    console.print(table)


def _row(result: Result, metrics: Sequence[str]) -> Iterator[Any]:
    yield result.cell.name
    yield " ".join(redact.text(v) for v in result.cell.varied)
    yield result.status
    yield from (result.metrics.get(m, "") for m in metrics)
    yield round(result.seconds, 1)
    yield result.error
