"""Refits a cluster's constants to measured layouts, and predicts again with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.plan.prediction.calibration.cluster_file import cluster_text, number
from launcher.plan.prediction.calibration.refit import MeasuredStep, Refit, error, refit
from launcher.plan.prediction.speeds import Speeds, speeds_of
from launcher.plan.values.text import many
from launcher.planner.search import show_ranking
from launcher.planner.search.evaluate import Predicted, Question
from launcher.planner.search.ranking import Ranking
from launcher.run.search.best_recipe import heading
from launcher.run.search.measure_layouts import MeasuredLayout

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
    refit: Refit
    errors: tuple[float, float]
    faster: tuple[Predicted, float] | None


def measured_cluster(ranking: Ranking, ran: Sequence[MeasuredLayout]) -> MeasuredCluster:
    """Refits to the layouts that ``ran``, at least one."""
    asked = ranking.question
    steps = [_step(asked, one.finalist.predicted, one.seconds) for one in ran if one.seconds is not None]
    found = refit(steps)
    speeds = speeds_of(found.cluster, asked.job.train.precision, asked.job.launch.nproc)
    assert speeds is not None
    return MeasuredCluster(
        ran=tuple(ran),
        after=tuple(one.finalist.predicted.on(speeds) for one in ran),
        refit=found,
        errors=(error(found.before, steps), error(found.after, steps)),
        faster=_faster(ranking, ran, speeds),
    )


def _step(asked: Question, predicted: Predicted, seconds: float) -> MeasuredStep:
    job = asked.job
    (work,) = predicted.works
    return MeasuredStep(work, job.cluster, job.train.precision, job.launch.nproc, seconds)


def _faster(
    ranking: Ranking, ran: Sequence[MeasuredLayout], speeds: Speeds
) -> tuple[Predicted, float] | None:
    """A layout predicted to be faster than the best one's measured and predicted times, if any."""
    best = ran[0]
    assert best.seconds is not None
    known = {one.finalist.predicted.layout for one in ran}
    others = [(one.on(speeds), one) for one in ranking.best if one.layout not in known]
    seconds, first = min(others, key=lambda pair: pair[0], default=(0.0, None))
    if first is None or seconds >= min(best.seconds, best.finalist.predicted.on(speeds)):
        return None
    return first, seconds


def table(found: MeasuredCluster) -> Iterator[str]:
    """A table of measured and predicted seconds, and of those predicted with the refitted constants."""
    rows = [("time", "predicted", "refitted", "layout"), *_rows(found)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for *times, layout in rows:
        cells = (f"{time:>{width}}" for time, width in zip(times, widths, strict=True))
        yield f"{'  '.join(cells)}  {layout}"


def note(found: MeasuredCluster) -> Iterator[str]:
    """The rows of the table as text, and the constants."""
    for time, before, after, layout in _rows(found):
        yield f"{time}, {before} predicted, {after} refitted: {layout}"
    yield from refitted(found)


def _rows(found: MeasuredCluster) -> Iterator[tuple[str, str, str, str]]:
    for one, after in zip(found.ran, found.after, strict=True):
        predicted = one.finalist.predicted
        time = "did not run" if one.seconds is None else show_ranking.took(one.seconds)
        why = f" ({one.why})" if one.seconds is None else ""
        before, now = (show_ranking.took(seconds) for seconds in (predicted.seconds, after))
        yield time, before, now, f"{show_ranking.layout(predicted)}{why}"


def refitted(found: MeasuredCluster) -> Iterator[str]:
    """The changed constants, and what they predict for layouts that were not measured."""
    moved = (f"{key} {number(old)} -> {number(new)}" for key, (old, new) in found.refit.fitted.items())
    yield ", ".join(moved) or "no constant is changed"
    yield _errors(found)
    if found.faster is not None:
        one, seconds = found.faster
        text = f"{show_ranking.layout(one)} was not measured, and is predicted to take"
        yield f"{text} {show_ranking.took(seconds)} with these constants, less than the best that was"


def _errors(found: MeasuredCluster) -> str:
    count = many(sum(one.seconds is not None for one in found.ran), "measured layout")
    before, after = found.errors
    return f"predictions of {count} were off by {before:.1%} on the mean, with these constants by {after:.1%}"


def file(found: MeasuredCluster) -> str:
    """The text of a cluster file with the refitted constants."""
    whole = found.refit.cluster
    name = (whole.name or "a cluster").removesuffix(REFITTED)
    heads = [
        heading(found.ran[0].finalist.job),
        f"The constants of {name}, some of them refitted: {_errors(found)}.",
        "As DIR/cluster/NAME.yaml it is --config-dir DIR cluster=NAME.",
    ]
    comments = {key: f"refitted, was {number(old)}" for key, (old, _) in found.refit.fitted.items()}
    for above in ("links.inside", "links.between"):
        inner = [
            f"{key.rpartition('.')[2]} {text}" for key, text in comments.items() if key.startswith(above)
        ]
        if inner:
            comments[above] = ", ".join(inner)
    return cluster_text(whole.model_copy(update={"name": f"{name}{REFITTED}"}), heads, comments)
