"""The folder of a sweep: whose it is, which folder in it each cell has, and which cells were pruned."""

from __future__ import annotations

import itertools
import json
import os
import shlex
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

PRUNED = "pruned.json"
"""Why, by the names of cells that were."""

COMMAND, JOB = "command.txt", "job"
"""What was typed, and which Slurm job began it."""

HOME = Path("runs/sweeps")


def open_folder(named: Path | None, words: Sequence[str]) -> Path:
    """``named``, else that of this very sweep if Slurm runs its job again, else a new one."""
    folder = named or _begun(HOME, words) or _new(HOME)
    _make(folder)
    write_text(folder / COMMAND, _command(words))
    if job := launch_env.job():
        write_text(folder / JOB, job)
    return folder


def _begun(above: Path, words: Sequence[str]) -> Path | None:
    job = launch_env.job()
    if job is None or not launch_env.again():
        return None
    for place in sorted(above.glob(f"*/{JOB}"), reverse=True):
        try:
            mine = read_text(place) == job and read_text(place.parent / COMMAND) == _command(words)
        except (OSError, ValueError):
            continue
        if mine:
            return place.parent
    return None


def _command(words: Sequence[str]) -> str:
    typed = [redact.text(word) for word in words]
    return shlex.join(["python", "-m", "launcher", "-m", *typed]) + "\n"


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


def named(folder: Path, cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells by the names of their folders; the same overrides keep theirs, new ones are numbered on."""
    path = folder / INDEX
    names = {tuple(overrides): name for name, overrides in known(folder).items()}
    out = []
    for cell in cells:
        key = without_run_dir(cell.overrides)
        if key not in names:
            names[key] = f"{len(names)}-{cell.name.partition('-')[2]}".rstrip("-")
        out.append(Cell(names[key], cell.overrides, cell.varied, cell.repeat))

    write_text(path, json.dumps({name: list(key) for key, name in names.items()}, indent=1) + "\n")
    return tuple(out)


def known(folder: Path) -> dict[str, list[str]]:
    """The overrides of each cell that there is. Raises ``RequestError`` for a file that does not say them."""
    index = folder / INDEX
    if not os.path.lexists(index):
        return {}
    try:
        found: dict[str, list[str]] = read_json(index)
    except (OSError, ValueError) as error:
        why = said(error) if isinstance(error, OSError) else f"{index}: no JSON"
        raise RequestError((Problem("sweep_dir", why),)) from error

    # anybody may have edited it
    rows: list[Any] = [*found.values()] if isinstance(found, dict) else [None]
    if not all(isinstance(row, list) and all(isinstance(word, str) for word in row) for row in rows):
        raise RequestError((Problem("sweep_dir", f"{index}: it does not say which overrides each cell has"),))
    return found


def texts(file: Path) -> dict[str, str]:
    """By the names of cells. One that is damaged says nothing: what it told of is done again."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def pruned(folder: Path) -> dict[str, str]:
    return texts(folder / PRUNED)


def prune(folder: Path, name: str, why: str) -> None:
    write_text(folder / PRUNED, json.dumps(pruned(folder) | {name: why}, indent=1) + "\n")


def without_run_dir(overrides: Sequence[str]) -> tuple[str, ...]:
    """What tells a cell from others, secrets hidden."""
    return tuple(redact.text(o) for o in overrides if not o.lstrip("+").startswith("run_dir="))
