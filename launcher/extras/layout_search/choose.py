"""Finds a layout for a request that leaves settings open, and writes it as a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.checkpoint.tensorfile.disk import write_bytes
from launcher.errors import Problem, refuse
from launcher.extras.layout_search import candidates, show
from launcher.extras.layout_search import measure as measuring
from launcher.extras.layout_search.evaluate import Finalist
from launcher.extras.layout_search.measure import measured, problems
from launcher.extras.layout_search.search import processes, search
from launcher.extras.layout_search.show import Ranking
from launcher.job.overrides import paste
from launcher.job.schema.job import Job
from launcher.plan.values.note import Note
from launcher.plan.values.resolved import Resolved
from launcher.planner.plan_job import planning
from launcher.planner.train_steps import with_steps
from launcher.run import launch, memory_check
from launcher.run.resolved_request import Chosen, open_ended
from launcher.runtime.processes.fork_server import serving

if TYPE_CHECKING:
    from launcher.run.external_ranks.leader import FollowerRanks

CLUSTER = "cluster.yaml"
"""The file next to the recipe of the best layout, if layouts were measured."""


def check(job: Job) -> None:
    """Raises ``RequestError`` for problems of a search that do not depend on the model."""
    wrong = [*candidates.impossible(_with_local_ranks(job)), *problems(job)]
    if job.show == "search" and not open_ended(job):
        how = "set keys below parallel to auto or to lists; parallel=auto opens all of them"
        wrong.append(Problem("show", f"search: nothing is set to auto: {how}", "parallel=auto"))
    if job.show == "search" and job.search.best:
        best = Path(job.search.best)
        unwritable = measuring.unwritable(best, job)
        if unwritable is None and job.search.measure:
            unwritable = _beside(best, job)
        wrong += [unwritable] if unwritable else []
    refuse(wrong)


def _with_local_ranks(job: Job) -> Job:
    """Returns ``job`` with the number of ranks that an outer launcher has started."""
    return launch.with_local_ranks(job, launch.outer_size())


def _beside(best: Path, job: Job) -> Problem | None:
    """Returns why the cluster file cannot be written next to the recipe."""
    if best.name == CLUSTER:
        text = f"{best}: the refitted cluster is written to this file; give the recipe another name"
        return Problem(measuring.BEST_KEY, text)
    problem = measuring.unwritable(best.with_name(CLUSTER), job)
    if problem is not None and problem.cure.endswith(CLUSTER):
        return replace(problem, cure=problem.cure.removesuffix(CLUSTER) + best.name)
    return problem


def choose_layout(job: Job, measure: bool = False, others: FollowerRanks | None = None) -> Chosen:
    """Returns ``job`` with all settings decided; by measurements if ``measure`` and the job requests them.

    ``others``: the ranks of an outer launcher.

    Raises ``RequestError``.
    """
    check(job)
    job = _with_local_ranks(job)
    finalists, ranking = _searched(job)
    if not (measure and job.search.measure):
        return Chosen(_with_open_steps(finalists[0].job, job), tuple(show.notes(ranking)))
    measurements = measuring.measured_cluster(ranking, measured(job, finalists, others))
    taken = measurements.ran[0].finalist
    note = Note("search.measure", "; ".join(measuring.note(measurements)))
    notes = (*show.notes(ranking, taken.predicted), note)
    return Chosen(_with_open_steps(taken.job, job), notes, measuring.cluster_file(measurements))


def shown(job: Job, others: FollowerRanks | None = None) -> Iterator[str]:
    """Yields the report of a search, and the path of the recipe that it writes."""
    job = memory_check.with_device_memory(_with_local_ranks(job))
    check(job)
    finalists, ranking = _searched(job)
    lines = [*show.text(ranking)]
    best = Chosen(_with_open_steps(finalists[0].job, job))
    if job.search.measure:
        measurements = measuring.measured_cluster(ranking, measured(job, finalists, others))
        taken = _with_open_steps(measurements.ran[0].finalist.job, job)
        best = Chosen(taken, cluster=measuring.cluster_file(measurements))
        lines += _labeled("measured", measuring.table(measurements))
        lines += _labeled("refitted", measuring.refitted(measurements))
    yield from lines
    if job.search.best is not None:
        path = Path(job.search.best)
        write(path, best, lines)
        yield f"  recipe     {path}: python -m launcher {paste('recipe', str(path))}"
        if best.cluster:
            beside = path.with_name(CLUSTER)
            yield f"  cluster    {beside}: copy to DIR/cluster/NAME.yaml, then --config-dir DIR cluster=NAME"


def _searched(job: Job) -> tuple[list[Finalist], Ranking]:
    """Returns the best layouts. Starts this process's fork server before anything is planned here."""
    with planning(), serving() as server:
        server.prepare()
        return search(with_steps(Resolved(job)).job, processes(), start=server.start)


def _with_open_steps(chosen: Job, job: Job) -> Job:
    """Returns the layout ``chosen``, with the number of steps open if ``job`` leaves it open.

    A recipe with both steps and epochs would be refused.
    """
    return chosen.model_copy(update={"train": chosen.train.model_copy(update={"steps": job.train.steps})})


def _labeled(label: str, lines: Iterator[str]) -> Iterator[str]:
    yield from (f"  {'' if n else label:<10} {line}" for n, line in enumerate(lines))


def write(path: Path, chosen: Chosen, comments: Sequence[str]) -> None:
    """Writes the recipe of the best layout, with ``comments``, and the cluster file next to it."""
    measuring.write(path, chosen.job, tuple(comments))
    if chosen.cluster:
        write_bytes(path.with_name(CLUSTER), chosen.cluster.encode())
