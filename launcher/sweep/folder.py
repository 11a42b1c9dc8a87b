"""The folder of a sweep: whose it is, and which folder in it each cell has."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.errors import Problem, RequestError, said
from launcher.job.schema import redact
from launcher.job.sweep_grid import Cell
from launcher.runtime.cluster import launch_env
from launcher.untrusted.files import read_json, read_text

INDEX = "sweep.json"
"""The overrides of each cell, by its name."""

JOB = "job"
"""Which Slurm job began it."""

HOME = Path("runs/sweeps")


def open_folder(named: Path | None, grid: Sequence[Cell]) -> Path:
    """``named``, else that of this very sweep if Slurm runs its job again, else a new one."""
    return named or _begun(HOME, grid) or _new(HOME)


def _begun(above: Path, grid: Sequence[Cell]) -> Path | None:
    job = launch_env.job()
    if job is None or not launch_env.again():
        return None
    keys = {without_run_dir(cell.overrides) for cell in grid}
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


def write_index(folder: Path, grid: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells by the names of their folders in ``folder``, which is made, and says whose job it is.

    The same overrides keep the folder they had; new ones are numbered on.
    """
    _make(folder)
    path = folder / INDEX
    names = {tuple(overrides): name for name, overrides in _known(path).items()}
    out = []
    for cell in grid:
        key = without_run_dir(cell.overrides)
        if key not in names:
            names[key] = f"{len(names)}-{cell.name.partition('-')[2]}".rstrip("-")
        out.append(Cell(names[key], cell.overrides, cell.varied))

    text = json.dumps({name: list(key) for key, name in names.items()}, indent=1)
    write_text(path, text + "\n")
    if job := launch_env.job():
        write_text(folder / JOB, job)
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

    # anybody may have edited it
    rows: list[Any] = [*known.values()] if isinstance(known, dict) else [None]
    if not all(isinstance(row, list) and all(isinstance(word, str) for word in row) for row in rows):
        raise RequestError((Problem("sweep_dir", f"{index}: it does not say which overrides each cell has"),))
    return known


def without_run_dir(overrides: Sequence[str]) -> tuple[str, ...]:
    """What tells a cell from others, secrets hidden."""
    return tuple(redact.text(o) for o in overrides if not o.lstrip("+").startswith("run_dir="))
