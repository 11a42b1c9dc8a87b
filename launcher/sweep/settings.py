"""Checks settings of ``sweep`` that are invalid or do not fit together, and chooses its metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Literal

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.objectives import figure
from launcher.job.schema.sweep import GRID, Sweep
from launcher.job.sweep_grid import Axis
from launcher.optional_packages import install_command
from launcher.run.cluster_jobs import handover

MEASURED = ("step_ms", "tokens_per_s", "samples_per_s", "memory_mb")
"""Measurements in the rows of a run, and of a complete run."""
TIMED = ("step_ms", "tokens_per_s", "samples_per_s", "seconds")
"""Metrics that cells distort when they run at the same time."""


def intervals(asked: Sweep, axes: Sequence[Axis]) -> Iterator[Problem]:
    """Reports intervals in a grid, which would have infinitely many cells."""
    for axis in axes:
        if axis.interval is not None and asked.sampler == GRID:
            key, _, shown = axis.words[0].lstrip("+").partition("=")
            text = f"{shown}: a grid is of lists of values, as {key}=A,B; samplers take intervals"
            yield Problem(key, text, "sweep.sampler=tpe sweep.cells=20")


def refused(asked: Sweep, axes: Sequence[Axis], jobs: Sequence[Job]) -> Iterator[Problem]:
    """Yields problems of a sweep's settings. ``jobs``: those of the cells that are known before any runs."""
    if asked.sampler != GRID:
        yield from _sampler(asked, axes)
    else:
        if asked.cells is not None:
            text = f"{asked.cells}: a grid has as many cells as there are combinations"
            yield Problem("sweep.cells", text, "sweep.sampler=tpe")
        if asked.prune is not None:
            text = f"{asked.prune}: only a sampler learns from cells that are ended early"
            yield Problem("sweep.prune", text)
    if asked.seeds > 1 and any(axis.varies and axis.key.lstrip("+") == "seed" for axis in axes):
        yield Problem("sweep.seeds", f"{asked.seeds}: seed varies already")
    if asked.certify and not any(_trains(job) for job in jobs):
        yield Problem("sweep.certify", "true: no cell trains, so there are no losses to compare")
    yield from _metric(asked, jobs)
    yield from _prune(asked, jobs)
    yield from _elsewhere(asked, jobs)


def metric(asked: Sweep, jobs: Sequence[Job]) -> str:
    """The metric by which cells are sorted."""
    if asked.metric is not None:
        return asked.metric
    return "val_loss" if any(_validates(job) for job in jobs) else "loss"


def side_by_side(asked: Sweep, metric: str) -> int | Literal["auto"]:
    """How many cells run at a time; for ``auto``, one if the metric is their speed."""
    return 1 if asked.parallel == "auto" and metric in TIMED else asked.parallel


def _sampler(asked: Sweep, axes: Sequence[Axis]) -> Iterator[Problem]:
    key = "sweep.sampler"
    if find_spec("optuna") is None:
        text = f"{asked.sampler}: optuna is not installed: {install_command('optuna')}"
        yield Problem(key, text)
    if not any(axis.varies for axis in axes):
        text = f"{asked.sampler}: nothing varies; give a key a list, A,B, or an interval, interval(LOW, HIGH)"
        yield Problem(key, text)
    if asked.cells is None and asked.minutes is None:
        text = "null: this says how many cells a sampler proposes, or sweep.minutes how long it goes on"
        yield Problem("sweep.cells", text, "sweep.cells=20")


def _metric(asked: Sweep, jobs: Sequence[Job]) -> Iterator[Problem]:
    """Reports a metric that no cell reports."""
    if asked.metric is None:
        return
    known = [*MEASURED, "seconds"]
    if any(_trains(job) for job in jobs):
        known.append("loss")
    for job in jobs:
        if _validates(job):
            known += ["val_loss", *(f"val_{figure(one)}" for one in job.metrics)]
    if asked.metric in known:
        return
    there = ", ".join(dict.fromkeys(reversed(known)))
    close = get_close_matches(asked.metric, known, 1)
    cure = f"sweep.metric={close[0]}" if close else ""
    yield Problem("sweep.metric", f"{asked.metric}: no cell reports it; there are {there}", cure)


def _prune(asked: Sweep, jobs: Sequence[Job]) -> Iterator[Problem]:
    if asked.prune is None:
        return
    if asked.seeds > 1:
        text = f"{asked.seeds}: sweep.prune ends a cell by what one run of it says, and each has several"
        yield Problem("sweep.seeds", text, "sweep.seeds=1")
    by = metric(asked, jobs)
    if by in (*MEASURED, "seconds"):
        text = f"{asked.prune}: goes by a loss or a metric of the model, and {by} is none"
        yield Problem("sweep.prune", text)
    elif by != "loss" and not any(job.train.eval_every for job in jobs):
        steps = min((job.train.steps or 10 for job in jobs), default=10)
        text = f"{asked.prune}: looks at {by} while cells train, and nothing is validated meanwhile"
        yield Problem("sweep.prune", text, f"train.eval_every={max(1, steps // 10)}")


def _elsewhere(asked: Sweep, jobs: Sequence[Job]) -> Iterator[Problem]:
    """Reports settings that do not work for cells on a cluster."""
    keys = dict.fromkeys(handover.key(job) for job in jobs)
    key = next((key for key in keys if key is not None), None)
    if key is None:
        return
    if len(keys) > 1:
        yield Problem(key, "some cells would run there, others not: a sweep has one place for all")
    if "launch.k8s" in keys:
        text = "cells of a sweep are no jobs of Kubernetes; write each by a run of its own"
        yield Problem("launch.k8s", text)
    if asked.sampler != GRID:
        text = f"{asked.sampler}: proposes cells by what others came to, and a cluster tells that later"
        yield Problem("sweep.sampler", f"{text}; inside an allocation, with launch=auto, it does")


def _trains(job: Job) -> bool:
    return any(step.kind == "train" for step in job.steps.values())


def _validates(job: Job) -> bool:
    evaluates = any(step.kind == "evaluate" for step in job.steps.values())
    return evaluates or (_trains(job) and job.train.eval_every is not None)
