"""Early stopping and the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.objective import figure
from launcher.plan.sizes import Sizes
from launcher.plan.values.setting import Setting
from launcher.plan.values.text import many
from launcher.plan.verbs import reads_best, trains, verb

STOP, BEST = "train.early_stop", "checkpoint.best"
WORDS = ("accuracy", "perplexity")
"""Metrics that a name alone requests, and that any data with classes support."""
VALIDATIONS = 10
"""The number of validations of a training that a cure proposes."""


def problems(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """Yields problems for metrics that no validation computes, and for an undefined best checkpoint."""
    yield from _unknown(job)
    named = {}
    if job.train.early_stop is not None:
        named[f"{STOP}.metric"] = job.train.early_stop.metric
    if job.checkpoint.best is not None:
        named[BEST] = job.checkpoint.best

    known = ("loss", "val_loss", *(f"val_{figure(one)}" for one in job.metrics))
    for key, metric in named.items():
        if metric not in known:
            text = f"{metric}: is not a metric of this run; use one of {', '.join(known)}"
            yield Problem(key, text, _cure(job, key, metric, known))
        elif job.train.eval_every is None and trains(job):
            every = max(1, (sizes.steps if sizes else VALIDATIONS) // VALIDATIONS)
            text = f"{metric}: is read after validations, but no validation runs during training"
            yield Problem(key, text, f"train.eval_every={every}")


def _cure(job: Job, key: str, metric: str, known: Sequence[str]) -> str:
    """Returns the override that names the most similar metric.

    It adds the metric to ``metrics`` if it is one of ``WORDS``.
    """
    name = metric.removeprefix("val_")
    near = f"val_{name}" if f"val_{name}" in known else ""
    if near or name not in WORDS or any(figure(m) != getattr(m, "name", "") for m in job.metrics):
        close = get_close_matches(metric, known, 1)
        return f"{key}={near or close[0]}" if near or close else ""
    every = ",".join((*map(figure, job.metrics), name))
    return f"{key}=val_{name} {quote(f'metrics=[{every}]')}"


def _unknown(job: Job) -> Iterator[Problem]:
    """Yields problems for steps that read the best checkpoint although ``checkpoint.best`` is not set."""
    for name, step in job.steps.items():
        if job.checkpoint.best is None and reads_best(step):
            text = "best: without checkpoint.best no checkpoint is recorded as the best"
            yield Problem(f"steps.{name}.{verb(step).source}", text, f"{BEST}=val_loss")


def rows(job: Job) -> Iterator[Setting]:
    """Yields the metrics of early stopping and of the best checkpoint."""
    stop, best = job.train.early_stop, job.checkpoint.best
    if stop is not None:
        more = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
        count = many(stop.patience, "validation")
        why = f"training ends, with a checkpoint, after {count} in which it has not"
        direction = "fallen" if stop.goal == "min" else "risen"
        yield Setting(f"{STOP}.metric", stop.metric, "applied", f"{why} {direction}{more}")
    if best is not None:
        least = "lowest" if job.checkpoint.best_goal == "min" else "highest"
        why = f"after a validation with the {least} value so far"
        why += " a checkpoint is saved and kept in addition to the newest"
        yield Setting(BEST, best, "applied", why)
