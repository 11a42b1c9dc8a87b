"""The folder of a sweep: finds or makes it, names its cells' folders, and records pruned cells."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.errors import Problem, RequestError, error_text
from launcher.job.schema import redact
from launcher.job.schema.job import Job
from launcher.job.sweep_grid import Cell
from launcher.runtime.cluster import launch_env
from launcher.runtime.run_folder import linked
from launcher.untrusted.files import read_json, read_text

INDEX = "sweep.json"
"""The overrides of each cell, by the cell's name."""

_NAME = re.compile(r"(\d{1,9})(?:-[\w.-]*)?", re.ASCII)
"""The name of a cell: one part of a path, which begins with its number."""

PRUNED = "pruned.json"
"""The reason why each pruned cell was pruned, by its name."""

COMMAND, JOB = "command.txt", "job"
"""The command as typed, and the Slurm job that began the sweep."""

HOME = Path("runs/sweeps")


def open_folder(named: Path | None, words: Sequence[str]) -> Path:
    """Returns ``named``, else the folder of this sweep if Slurm restarts its job, else a new one.

    Raises ``RequestError`` if there is a link in it, where the sweep or a cell would write.
    """
    folder = named or _begun(HOME, words) or _new(HOME)
    _make(folder)
    _check_links(folder)
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
    """Makes a folder that no other sweep has."""
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
        raise RequestError(
            (Problem("sweep_dir", f"{folder}: cannot be created: {error.strerror}"),)
        ) from error


def _check_links(folder: Path) -> None:
    """Raises ``RequestError`` for links in ``folder``. Each cell refuses those in its own folder."""
    with os.scandir(folder) as entries:
        found = sorted(Path(entry.path) for entry in entries if entry.is_symlink())
    if found:
        raise RequestError((linked("sweep_dir", folder, "a sweep folder", found),))


def named(folder: Path, cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Names the cells' folders. Known overrides keep their name; new ones get the next number."""
    path = folder / INDEX
    names = {tuple(overrides): name for name, overrides in known_cells(folder).items()}
    count = max((int(name.partition("-")[0]) + 1 for name in names.values()), default=0)
    out = []
    for cell in cells:
        key = identity(cell.overrides)
        if key not in names:
            names[key] = f"{count}-{cell.name.partition('-')[2]}".rstrip("-")
            count += 1
        out.append(Cell(names[key], cell.overrides, cell.varied, cell.repeat))

    write_text(path, json.dumps({name: list(key) for key, name in names.items()}, indent=1) + "\n")
    return tuple(out)


def known_cells(folder: Path) -> dict[str, list[str]]:
    """Returns the overrides of each known cell, by name.

    Raises ``RequestError`` for a file that is damaged, or has a name that leads out of ``folder``.
    """
    index = folder / INDEX
    if not os.path.lexists(index):
        return {}
    try:
        overrides: dict[str, list[str]] = read_json(index)
    except (OSError, ValueError) as error:
        why = error_text(error) if isinstance(error, OSError) else f"{index}: not JSON"
        raise RequestError((Problem("sweep_dir", why),)) from error

    # users may edit the file
    rows: list[Any] = [*overrides.values()] if isinstance(overrides, dict) else [None]
    if not all(isinstance(row, list) and all(isinstance(word, str) for word in row) for row in rows):
        raise RequestError((Problem("sweep_dir", f"{index}: it does not list the overrides of each cell"),))
    for name in overrides:
        if not _NAME.fullmatch(name):
            text = f"{index}: {name!r} is not the name of a cell, which is a number and words, such as 0-1"
            raise RequestError((Problem("sweep_dir", text, another(folder)),))
    return overrides


def another(folder: Path) -> str:
    """Returns the word that names a new folder beside ``folder``, ready for a shell."""
    new = next(p for k in itertools.count(2) if not os.path.lexists(p := f"{folder}-{k}"))
    return shlex.quote(f"sweep_dir={new}")


UNCOMPARED = (
    "name", "recipe", "runs", "run_dir", "show", "search", "sweep", "logger", "security", "checkpoint",
    "launch",
)  # fmt: skip
"""Sections that a recipe may change while a sweep of it continues: a cell's result is the same."""


def edited(run: Path, job: Job) -> tuple[str, Any, Any] | None:
    """Returns the first setting that differs in ``run``: its key, its value there, and that of ``job``.

    ``None`` if there is none, or if no run has started there. Secrets are hidden, and not compared.
    """
    try:
        ran = Job.model_validate(yaml.safe_load(read_text(run / "config.yaml")))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    then, now = (redact.values(one.model_dump(mode="json", by_alias=True)) for one in (ran, job))
    differ = ((key, then.get(key), now[key]) for key in now if key not in UNCOMPARED)
    return next(((key, *values) for key, *values in map(_inner, differ) if values[0] != values[1]), None)


def _inner(difference: tuple[str, Any, Any]) -> tuple[str, Any, Any]:
    """Returns the same difference at the first key below that has it."""
    key, old, new = difference
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        below = next((name for name in new if old[name] != new[name]), None)
        if below is not None:
            return _inner((f"{key}.{below}", old[below], new[below]))
    return difference


def texts(file: Path) -> dict[str, str]:
    """Returns the texts in ``file``, by names of cells.

    There are none if the file is damaged, so that its cells run again.
    """
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in content.items()} if isinstance(content, dict) else {}


def pruned(folder: Path) -> dict[str, str]:
    return texts(folder / PRUNED)


def prune(folder: Path, name: str, why: str) -> None:
    write_text(folder / PRUNED, json.dumps(pruned(folder) | {name: why}, indent=1) + "\n")


def identity(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides that identify a cell, as ``status.json`` has them: with digests of secrets."""
    return tuple(map(redact.identity, without_run_dir(overrides)))


def without_run_dir(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(o for o in overrides if not o.lstrip("+").startswith("run_dir="))
