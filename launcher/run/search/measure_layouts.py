"""Measures the best layouts of a search by training each for some steps where the job would run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from launcher.console import say
from launcher.errors import Problem, RunError
from launcher.job.schema.job import Checkpoint, Debug, Job
from launcher.job.schema.loggers import Logger
from launcher.job.schema.search import Search
from launcher.job.schema.steps import Train as TrainStep
from launcher.planner.plan_job import plan_job
from launcher.planner.search.settle import Finalist
from launcher.run import execute, launch
from launcher.runtime.scratch import scratch

if TYPE_CHECKING:
    from launcher.run.outer_ranks.leader import Others

WARM = 2
"""Steps that are not counted: they allocate memory and fill caches."""


@dataclass(frozen=True)
class MeasuredLayout:
    """``seconds``: the median of a step; ``None`` if the layout did not run, for the reason ``why``."""

    finalist: Finalist
    seconds: float | None
    why: str = ""


def refused(job: Job) -> list[Problem]:
    """Problems of measuring that show before anything is started."""
    if not job.search.measure:
        return []
    outer = launch.outer_size()
    job = launch.at_home(job, outer)
    problems = _nowhere(job, outer)
    if job.search.steps <= WARM:
        text = f"{job.search.steps}: the first {WARM} of them do not count, so it takes {WARM + 1} at least"
        problems.append(Problem("search.steps", text, f"search.steps={WARM + 6}"))
    return problems


def _nowhere(job: Job, outer: int | None) -> list[Problem]:
    """Problems of ranks that this process cannot start, or that were not started."""
    elsewhere = job.launch.nnodes > 1 and launch.mode(job, outer) != "external"
    if elsewhere and job.show == "search":
        text = f"{job.search.measure}: layouts are measured where they would run, and launch.nnodes is"
        text = f"{text} {job.launch.nnodes}: start it with {launch.THEY}; search.measure=0 only predicts"
        return [Problem("search.measure", text)]
    problems = launch.refused(job, outer)
    if problems or job.launch.nproc is None:
        return problems
    return launch.mismatched(job, outer, job.launch.nproc * job.launch.nnodes)


def measured(job: Job, finalists: Sequence[Finalist], others: Others | None) -> list[MeasuredLayout]:
    """Measures all layouts; returns the fastest first, failed ones last. Raises ``RunError`` if all fail."""
    if others is not None:
        others.gather(job.launch.timeout_s)
    found = []
    for n, one in enumerate(finalists, 1):
        say(f"search: measuring layout {n} of {len(finalists)}")
        found.append(_measured(one, job.search.steps, others))
    if all(one.seconds is None for one in found):
        raise RunError(f"none of the {len(found)} best layouts ran: {found[0].why}")
    return sorted(found, key=lambda one: math.inf if one.seconds is None else one.seconds)


def _measured(one: Finalist, steps: int, others: Others | None) -> MeasuredLayout:
    job = _short(one.job, steps)
    plan = plan_job(job)
    took: list[float] = []

    def hear(rank: int, news: object) -> None:
        if rank == 0 and isinstance(news, dict) and "step_ms" in news:
            took.append(news["step_ms"] / 1e3)

    with scratch() as folder:
        start = launch.start(job, launch.outer_size(), plan.sizes.grid.size)
        run = execute.Run(job, plan, folder, start, others=others, resume=None, trial=True)
        try:
            for phase in plan.phases:
                execute.do(run, phase, {}, hear)
        except RunError as error:
            return MeasuredLayout(one, None, str(error).splitlines()[0])
    return MeasuredLayout(one, median(took[WARM:]))


def _short(job: Job, steps: int) -> Job:
    """``job`` with only its first steps; nothing of them is kept, even after a failure or a stop."""
    train = job.train.model_copy(
        update={
            "steps": max(steps, job.train.steps or 0),
            "eval_every": None,
            "early_stop": None,
            "log_every": 1,
        }
    )
    changed = {
        "train": train,
        "steps": {"train": TrainStep(kind="train")},
        "debug": Debug(limit=steps),
        "launch": job.launch.model_copy(update={"max_restarts": 0, "signal_save": False}),
        "checkpoint": Checkpoint(resume="never"),
        "logger": Logger(progress="off"),
        "callbacks": (),
        "search": Search(),
    }
    return job.model_copy(update=changed)
