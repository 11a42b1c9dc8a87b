"""A request that leaves settings open: the layout that is found for it, and where that is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import refuse
from launcher.job.schema.job import Job
from launcher.plan.partition.sizes import Note
from launcher.planner.plan_job import planning
from launcher.planner.search import candidates, show_ranking
from launcher.planner.search.search import search
from launcher.run import best_recipe

MOST_PROCESSES = 8


def open_ended(job: Job) -> bool:
    """Whether anything is left to the search."""
    return bool(job.search.over)


def check(job: Job) -> None:
    """Raises ``RequestError`` for what is wrong with a search whatever the model is."""
    found = candidates.impossible(job)
    if job.show == "search":
        unwritable = best_recipe.unwritable(Path(job.search.best)) if job.search.best else None
        found += [unwritable] if unwritable else []
    refuse(found)


def settled(job: Job) -> tuple[Job, tuple[Note, ...]]:
    """``job`` with nothing left open, and what was chosen. Raises ``RequestError``."""
    if not open_ended(job):
        return job, ()
    check(job)
    with planning():
        found, ranking = search(job, processes())
    return found, tuple(show_ranking.notes(ranking))


def shown(job: Job) -> Iterator[str]:
    """What was found, and the recipe that it is written to."""
    check(job)
    with planning():
        found, ranking = search(job, processes())
    lines = tuple(show_ranking.text(ranking))
    yield from lines
    if job.search.best is not None:
        path = Path(job.search.best)
        best_recipe.write(path, found, lines)
        yield f"  recipe     {path}: python -m launcher recipe={path}"


def processes() -> int:
    """One a core."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
