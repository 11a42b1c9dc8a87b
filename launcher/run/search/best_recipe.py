"""Writes the request that a search has settled as a recipe that runs unchanged."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.tensorfile.durable import write_bytes
from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.search import Search
from launcher.run import recipe_of_job
from launcher.runtime import folder

KEY = "search.best"
_WRITTEN = "Written by a search"


def heading(job: Job) -> str:
    """The first line of a file that a search of ``job`` writes, which identifies it to later searches."""
    return f"{_WRITTEN} for {job.name}."


def unwritable(path: Path, job: Job) -> Problem | None:
    """Why the file cannot be written; only files written by searches of the same run are replaced."""
    if path.is_dir():
        return Problem(KEY, f"{path}: is a folder, not a file")
    if path.suffix != ".yaml":
        return Problem(KEY, f"{path}: a recipe's name ends in .yaml", f"{KEY}={path}.yaml")
    if path.is_file():
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        if not first.startswith(f"# {_WRITTEN}"):
            return Problem(KEY, f"{path}: is there, and no search has written it", f"{KEY}=null")
        if first not in (f"# {_WRITTEN}.", f"# {heading(job)}"):
            whose = first.removeprefix(f"# {_WRITTEN} for ").removesuffix(".")
            text = f"{path}: a search for {whose} has written it; this one is for {job.name}"
            return Problem(KEY, text, f"{KEY}={path.parent / job.name / path.name}")
    return folder.check_writable(path.parent, KEY, "the folder of this file")


def write(path: Path, job: Job, said: tuple[str, ...] = ()) -> None:
    """Writes the recipe atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    settled = job.model_copy(update={"search": Search()})
    write_bytes(path, recipe_of_job.text(settled, (heading(job), *said)).encode())
