"""Measures the best layouts of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from launcher.checkpoint.tensorfile.disk import write_bytes
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.console import say
from launcher.errors import Problem, RunError
from launcher.extras.layout_search import show
from launcher.extras.layout_search.evaluate import Finalist, Predicted, SearchContext
from launcher.extras.layout_search.show import Ranking
from launcher.job.schema.checkpoint import Checkpoint
from launcher.job.schema.debug import Debug
from launcher.job.schema.job import Job
from launcher.job.schema.logger import Logger
from launcher.job.schema.search import Search
from launcher.job.schema.steps import Train as TrainStep
from launcher.optional import calibration
from launcher.plan.time.speeds import Speeds, speeds_of
from launcher.plan.values.text import many
from launcher.planner.plan_job import plan_job
from launcher.run import execute, frozen_request, launch
from launcher.runtime import run_folder
from launcher.runtime.run_folder import scratch

if TYPE_CHECKING:
    from launcher.run.external_ranks.leader import FollowerRanks


WARM = 2
"""Steps that are not counted: they allocate memory and fill caches."""


@dataclass(frozen=True)
class MeasuredLayout:
    """The measurement of one layout.

    ``seconds``: the median of a step; ``None`` if the layout did not run, for the reason ``why``.
    """

    finalist: Finalist
    seconds: float | None
    why: str = ""


def problems(job: Job) -> list[Problem]:
    """Returns problems of measuring that are known before anything is started."""
    if not job.search.measure:
        return []
    outer = launch.outer_size()
    job = launch.with_local_ranks(job, outer)
    problems = _nowhere(job, outer)
    if job.search.steps <= WARM:
        text = f"{job.search.steps}: the first {WARM} steps do not count, so at least {WARM + 1} are needed"
        problems.append(Problem("search.steps", text, f"search.steps={WARM + 6}"))
    return problems


def _nowhere(job: Job, outer: int | None) -> list[Problem]:
    """Returns problems of ranks that this process cannot start, or that were not started."""
    elsewhere = job.launch.nnodes > 1 and launch.mode(job, outer) != "external"
    if elsewhere and job.show == "search":
        text = f"{job.search.measure}: layouts are measured where they would run, and launch.nnodes is"
        text = f"{text} {job.launch.nnodes}: start it with {launch.THEY}; search.measure=0 only predicts"
        return [Problem("search.measure", text)]
    problems = launch.problems(job, outer)
    if problems or job.launch.nproc is None:
        return problems
    return launch.mismatched(job, outer, job.launch.nproc * job.launch.nnodes)


def measured(job: Job, finalists: Sequence[Finalist], others: FollowerRanks | None) -> list[MeasuredLayout]:
    """Measures all layouts; returns the fastest first, failed ones last. Raises ``RunError`` if all fail."""
    if others is not None:
        others.gather(job.launch.timeout_s)
    layouts = []
    for n, one in enumerate(finalists, 1):
        say(f"search: measuring layout {n} of {len(finalists)}")
        layouts.append(_measured(one, job.search.steps, others))
    if all(one.seconds is None for one in layouts):
        raise RunError(f"none of the {len(layouts)} best layouts ran: {layouts[0].why}")
    return sorted(layouts, key=lambda one: math.inf if one.seconds is None else one.seconds)


def _measured(one: Finalist, steps: int, others: FollowerRanks | None) -> MeasuredLayout:
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
    """Returns ``job`` with only its first steps; nothing of them is kept, even after a failure or a stop."""
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


BEST_KEY = "search.best"
_WRITTEN = "Written by a search"


def first_line(job: Job) -> str:
    """Returns the first line of the files of a search of ``job``; a later search recognizes them by it."""
    return f"{_WRITTEN} for {job.name}."


def unwritable(path: Path, job: Job) -> Problem | None:
    """Returns why the file cannot be written; only files written by searches of the same run are replaced."""
    if problem := run_folder.check_file(path, BEST_KEY):
        return problem
    if path.suffix != ".yaml":
        return Problem(BEST_KEY, f"{path}: a recipe's name ends in .yaml", f"{BEST_KEY}={path}.yaml")
    if path.is_file():
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        if not first.startswith(f"# {_WRITTEN}"):
            return Problem(BEST_KEY, f"{path}: exists, and was not written by a search", f"{BEST_KEY}=null")
        if first not in (f"# {_WRITTEN}.", f"# {first_line(job)}"):
            whose = first.removeprefix(f"# {_WRITTEN} for ").removesuffix(".")
            text = f"{path}: a search for {whose} wrote it; this one is for {job.name}"
            return Problem(BEST_KEY, text, f"{BEST_KEY}={path.parent / job.name / path.name}")
    return None


def write(path: Path, job: Job, comments: tuple[str, ...] = ()) -> None:
    """Writes the recipe atomically."""
    make_folder(path.parent)
    settled = job.model_copy(update={"search": Search()})
    write_bytes(path, frozen_request.recipe_text(settled, (first_line(job), *comments)).encode())


REFITTED = " (refitted)"
"""A suffix of the cluster's name."""


@dataclass(frozen=True)
class MeasuredCluster:
    """Measured layouts, and the cluster that was refitted to them.

    ``ran``: the layouts, fastest first; ``after``: the seconds of each as predicted with the constants of
    ``refit``. ``errors``: the mean errors before and after; ``faster``: the best layout that was not
    measured, if it is now predicted to be faster than the best measured one.
    """

    ran: tuple[MeasuredLayout, ...]
    after: tuple[float, ...]
    refit: calibration.Refit
    errors: tuple[float, float]
    faster: tuple[Predicted, float] | None


def measured_cluster(ranking: Ranking, ran: Sequence[MeasuredLayout]) -> MeasuredCluster:
    """Refits to the layouts that ``ran``, at least one."""
    context = ranking.question
    steps = [_step(context, one.finalist.predicted, one.seconds) for one in ran if one.seconds is not None]
    refit = calibration.refit(steps)
    speeds = speeds_of(refit.cluster, context.job.train.precision, context.job.launch.nproc)
    assert speeds is not None
    return MeasuredCluster(
        ran=tuple(ran),
        after=tuple(one.finalist.predicted.on(speeds) for one in ran),
        refit=refit,
        errors=(calibration.error(refit.before, steps), calibration.error(refit.after, steps)),
        faster=_faster(ranking, ran, speeds),
    )


def _step(context: SearchContext, predicted: Predicted, seconds: float) -> calibration.MeasuredStep:
    job = context.job
    (work,) = predicted.works
    return calibration.MeasuredStep(work, job.cluster, job.train.precision, job.launch.nproc, seconds)


def _faster(
    ranking: Ranking, ran: Sequence[MeasuredLayout], speeds: Speeds
) -> tuple[Predicted, float] | None:
    """Returns a layout predicted to be faster than the best one's measured and predicted times, if any."""
    best = ran[0]
    assert best.seconds is not None
    known = {one.finalist.predicted.layout for one in ran}
    others = [(one.on(speeds), one) for one in ranking.best if one.layout not in known]
    seconds, first = min(others, key=lambda pair: pair[0], default=(0.0, None))
    if first is None or seconds >= min(best.seconds, best.finalist.predicted.on(speeds)):
        return None
    return first, seconds


def table(measured: MeasuredCluster) -> Iterator[str]:
    """Yields a table of measured and predicted seconds.

    It also has the seconds that the refitted constants predict.
    """
    rows = [("time", "predicted", "refitted", "layout"), *_time_rows(measured)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for *times, layout in rows:
        cells = (f"{time:>{width}}" for time, width in zip(times, widths, strict=True))
        yield f"{'  '.join(cells)}  {layout}"


def note(measured: MeasuredCluster) -> Iterator[str]:
    """Yields the rows of the table as text, and the constants."""
    for time, before, after, layout in _time_rows(measured):
        yield f"{time}, {before} predicted, {after} refitted: {layout}"
    yield from refitted(measured)


def _time_rows(measured: MeasuredCluster) -> Iterator[tuple[str, str, str, str]]:
    for one, after in zip(measured.ran, measured.after, strict=True):
        predicted = one.finalist.predicted
        time = "did not run" if one.seconds is None else show.took(one.seconds)
        why = f" ({one.why})" if one.seconds is None else ""
        before, now = (show.took(seconds) for seconds in (predicted.seconds, after))
        yield time, before, now, f"{show.layout(predicted)}{why}"


def refitted(measured: MeasuredCluster) -> Iterator[str]:
    """Yields the changed constants, and what they predict for layouts that were not measured."""
    moved = (
        f"{key} {calibration.number(old)} -> {calibration.number(new)}"
        for key, (old, new) in measured.refit.fitted.items()
    )
    yield ", ".join(moved) or "no constant is changed"
    yield _errors(measured)
    if measured.faster is not None:
        one, seconds = measured.faster
        text = f"{show.layout(one)} was not measured, and is predicted to take"
        yield f"{text} {show.took(seconds)} with these constants, less than the best measured one"


def _errors(measured: MeasuredCluster) -> str:
    count = many(sum(one.seconds is not None for one in measured.ran), "measured layout")
    before, after = measured.errors
    return f"predictions of {count} were off by {before:.1%} on average, with these constants by {after:.1%}"


def cluster_file(measured: MeasuredCluster) -> str:
    """Returns the text of a cluster file with the refitted constants."""
    cluster = measured.refit.cluster
    name = (cluster.name or "a cluster").removesuffix(REFITTED)
    heads = [
        first_line(measured.ran[0].finalist.job),
        f"The constants of {name}, some of them refitted: {_errors(measured)}.",
        "Copy it to DIR/cluster/NAME.yaml, then --config-dir DIR cluster=NAME.",
    ]
    comments = {
        key: f"refitted, was {calibration.number(old)}" for key, (old, _) in measured.refit.fitted.items()
    }
    for above in ("links.inside", "links.between"):
        inner = [
            f"{key.rpartition('.')[2]} {text}" for key, text in comments.items() if key.startswith(above)
        ]
        if inner:
            comments[above] = ", ".join(inner)
    return calibration.cluster_text(cluster.model_copy(update={"name": f"{name}{REFITTED}"}), heads, comments)
