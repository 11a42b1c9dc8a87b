"""A request that leaves settings open: the layout that is found for it, and where that is written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import refuse
from launcher.job.schema.job import Job
from launcher.plan.partition.sizes import Note
from launcher.planner.plan_job import planning
from launcher.planner.search import candidates, show_ranking
from launcher.planner.search.search import search
from launcher.run import best_recipe, launch, memory_check
from launcher.run.measure_layouts import MeasuredLayout, measured, refused

if TYPE_CHECKING:
    from launcher.run.outer_ranks import Others

MOST_PROCESSES = 8


def open_ended(job: Job) -> bool:
    """Whether anything is left to the search."""
    return bool(job.search.over)


def check(job: Job) -> None:
    """Raises ``RequestError`` for what is wrong with a search whatever the model is."""
    found = [*candidates.impossible(job), *refused(job)]
    if job.show == "search":
        unwritable = best_recipe.unwritable(Path(job.search.best)) if job.search.best else None
        found += [unwritable] if unwritable else []
    refuse(found)


def settled(job: Job, measure: bool = False, others: Others | None = None) -> tuple[Job, tuple[Note, ...]]:
    """``job`` with nothing left open, and what was chosen; where it asks to ``measure``, by that too.

    ``others``: the ranks of an outer launcher.

    Raises ``RequestError``.
    """
    if not open_ended(job):
        return job, ()
    check(job)
    with planning():
        found, ranking = search(job, processes())
    if not (measure and job.search.measure):
        return found[0].job, tuple(show_ranking.notes(ranking))
    ran = measured(job, found, others)
    taken = ran[0].finalist
    told = Note("search.measure", "; ".join(_compared(ran)))
    return taken.job, (*show_ranking.notes(ranking, taken.predicted), told)


def shown(job: Job, others: Others | None = None) -> Iterator[str]:
    """What was found, and the recipe that it is written to."""
    job = memory_check.told(launch.at_home(job, launch.outer_size()))
    check(job)
    with planning():
        found, ranking = search(job, processes())
    lines = [*show_ranking.text(ranking)]
    best = found[0].job
    if job.search.measure:
        ran = measured(job, found, others)
        best = ran[0].finalist.job
        lines += [f"  {'measured' if not n else '':<10} {line}" for n, line in enumerate(_compared(ran))]
    yield from lines
    if job.search.best is not None:
        path = Path(job.search.best)
        best_recipe.write(path, best, tuple(lines))
        yield f"  recipe     {path}: python -m launcher recipe={path}"


def _compared(ran: Sequence[MeasuredLayout]) -> Iterator[str]:
    """The fastest first: what was measured, and what was predicted."""
    for one in ran:
        predicted = one.finalist.predicted
        said = f"{show_ranking.took(predicted.seconds)} predicted: {show_ranking.layout(predicted)}"
        if one.seconds is None:
            yield f"did not run ({one.why}), {said}"
        else:
            yield f"{show_ranking.took(one.seconds)} a step, {said}"


def processes() -> int:
    """One a core."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
