"""A grid of runs, one process a cell: a cell that fails is recorded, the others go on."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import Problem, RequestError
from launcher.job import redact
from launcher.job.args import Args
from launcher.job.cells import Cell, cells
from launcher.job.compose import BadRequest, compose
from launcher.job.origins import Origins
from launcher.job.overrides import quoted, shell
from launcher.job.shelf import Shelf

INDEX = "sweep.json"
GRACE_S = 5.0


@dataclass(frozen=True)
class Result:
    cell: Cell
    status: str
    metrics: dict[str, Any]
    seconds: float
    error: str


def sweep(args: Args, rank: int | None, command: Sequence[str] = (sys.executable, "-m", "launcher")) -> int:
    """Check every cell, then run those that are not done; 1 if any failed. Raises ``RequestError`` before any runs."""
    if rank is not None:
        text = "a sweep cannot run under torchrun or srun (RANK is set): each cell starts its own ranks"
        words = " ".join(shell(redact.text(o)) for o in args.overrides)
        raise RequestError((Problem("", f"-m: {text}", f"python -m launcher -m {words}"),))
    grid = check(args)
    folder = args.sweep_dir or _new(Path("runs/sweeps"))
    named = _index(folder, grid)
    flags = () if args.config_dir is None else ("--config-dir", str(args.config_dir))
    results: list[Result] = []
    for k, cell in enumerate(named, 1):
        done = _result(folder, cell)
        label = f"[{k}/{len(named)}] {cell.name}"
        if done is not None and done.status == "done":
            print(f"{label}: already done", flush=True)
        else:
            print(f"{label}: running, log in {folder / cell.name}.log", flush=True)
            done = _run(folder, cell, (*command, *flags))
            why = f": {done.error}" if done.error else ""
            print(f"{label}: {done.status} after {done.seconds:.1f} s{why}", flush=True)
        results.append(done)
        if done.status == "interrupted":
            break
    _summary(folder, results)
    return int(any(r.status != "done" for r in results))


def check(args: Args) -> tuple[Cell, ...]:
    """The cells, each composed; each problem once, whichever cell has it. Raises ``RequestError``."""
    config_dir = args.config_dir
    grid = cells(args.overrides, Shelf.of(config_dir))
    places: dict[Problem, Origins] = {}
    for cell in grid:
        try:
            request = compose(cell.overrides, config_dir=config_dir)
        except BadRequest as error:
            origins = error.origins if isinstance(error.origins, Origins) else Origins()
            places.update({p: origins for p in error.problems if p not in places})
            continue
        if request.job.run_dir is not None:
            problem = Problem(
                "run_dir", f"{request.job.run_dir}: a sweep gives each cell its own folder", "sweep_dir=DIR"
            )
            places.setdefault(problem, request.origins)
    if places:
        raise BadRequest(tuple(places), places)
    return grid


def _new(above: Path) -> Path:
    """A folder that no other sweep has."""
    above.mkdir(parents=True, exist_ok=True)
    for k in itertools.count(1):
        folder = above / f"{k:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("counting ended")


def _index(folder: Path, grid: Sequence[Cell]) -> tuple[Cell, ...]:
    """The same overrides keep the folder they had; new ones are numbered on."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / INDEX
    known: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = {tuple(overrides): name for name, overrides in known.items()}
    out = []
    for cell in grid:
        key = _hidden(cell.overrides)
        if key not in names:
            names[key] = f"{len(names)}-{cell.name.partition('-')[2]}".rstrip("-")
        out.append(Cell(names[key], cell.overrides, cell.varied))
    text = json.dumps({name: list(key) for key, name in names.items()}, indent=1)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text + "\n", encoding="utf-8")
    fresh.replace(path)
    return tuple(out)


def _hidden(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(redact.text(o) for o in overrides if not o.lstrip("+").startswith("run_dir="))


def _result(folder: Path, cell: Cell) -> Result | None:
    """What the cell's own ``status.json`` says; ``None`` when it says nothing about these overrides."""
    try:
        status = json.loads((folder / cell.name / "status.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    if not isinstance(status, dict) or status.get("status") not in ("done", "failed"):
        return None
    if _hidden(status.get("overrides", ())) != _hidden(cell.overrides):
        return None
    error = status.get("error") or ""
    return Result(
        cell, status["status"], dict(_scalars(status.get("metrics") or {})), status.get("seconds") or 0.0, str(error)
    )


def _scalars(metrics: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """What fits a column of the table; nested figures by dotted name."""
    for name, value in metrics.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, dict):
            yield from _scalars(value, key)
        elif isinstance(value, int | float | str):
            yield key, value


def _run(folder: Path, cell: Cell, command: Sequence[str]) -> Result:
    """One cell in a process group of its own; ended with its ranks when this process is told to stop."""
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
        )
        code = _wait(child)
    seconds = time.monotonic() - began
    if code is None:
        return Result(cell, "interrupted", {}, seconds, "interrupted")
    said = _result(folder, cell)
    if said is not None and (said.status == "done") == (code == 0):
        return said
    return Result(cell, "failed", {}, seconds, f"exit code {code}: {_last_line(folder / f'{cell.name}.log')}")


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    """Exit code; ``None`` when Ctrl-C or SIGTERM came first, and the group is gone then."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        return child.wait()
    except KeyboardInterrupt:
        _end(child)
        return None
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(child: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, how)
            child.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def _summary(folder: Path, results: Sequence[Result]) -> None:
    """``summary.csv`` with every metric, and a table of the same on the console."""
    metrics = list(dict.fromkeys(k for r in results for k in r.metrics))
    head = ["cell", "overrides", "status", *metrics, "seconds", "error"]
    rows = [list(_row(r, metrics)) for r in results]
    with (folder / "summary.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([head, *rows])
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
