"""Refuses layouts that ``transform`` cannot write."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Evaluate, Export, Transform
from launcher.plan.sizes import Sizes
from launcher.plan.step_order import comes_after
from launcher.plan.values.text import many

LAYOUT = ("nproc", "stages", "shard_size", "tp")
"""The settings of ``transform`` that define a layout without a strategy file."""


def problems(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """Yields problems for layouts that ``transform`` cannot make, or that are defined twice."""
    for name, step in job.steps.items():
        if not isinstance(step, Transform):
            continue
        key = f"steps.{name}"
        source = sizes.grid["pp"] if step.src is None and sizes is not None else None
        yield from _rank_files(key, step, job)

        # the layout comes from the settings or from a file
        if step.strategy is None:
            yield from unmergeable(key, source, **{field: getattr(step, field) for field in LAYOUT})
            continue
        for field in LAYOUT:
            n = getattr(step, field)
            if n != 1:
                text = f"{n}: the layout is that of the strategy file {step.strategy}"
                yield Problem(f"{key}.{field}", text, f"{key}.{field}=1")


def unmergeable(
    key: str, source: int | None, *, nproc: int, stages: int, shard_size: int, tp: int = 1
) -> Iterator[Problem]:
    """Yields problems of a target layout, whose settings are below ``key``.

    Stages can be merged, but never cut, because cutting needs the model. ``source``: the number of stages of
    the checkpoint, if known.
    """
    for name, n in (("nproc", nproc), ("stages", stages), ("shard_size", shard_size), ("tp", tp)):
        if n < 1:
            yield Problem(f"{key}.{name}", f"{n}: must be at least 1", f"{key}.{name}=1")
    if min(nproc, stages, shard_size, tp) < 1:
        return

    fits = stages
    if source is not None and source % stages:
        fits = max(n for n in range(1, min(stages, source) + 1) if source % n == 0)
        text = f"{stages}: cannot be made from {many(source, 'stage')}; stages are merged, not cut"
        yield Problem(f"{key}.stages", text, f"{key}.stages={fits}")

    unit = fits * shard_size * tp
    if nproc % unit:
        ways = f" x {tp}-way tensor parallelism" if tp > 1 else ""
        text = f"{nproc}: does not divide into {many(fits, 'stage')} x {many(shard_size, 'shard')}{ways}"
        yield Problem(f"{key}.nproc", text, f"{key}.nproc={-(-nproc // unit) * unit}")


def _rank_files(key: str, step: Transform, job: Job) -> Iterator[Problem]:
    """Yields problems for settings that only some sources have, and for steps that cannot read rank files."""
    if step.src_strategy is not None and step.src is None:
        text = f"{step.src_strategy}: the run's own checkpoint contains its layout"
        yield Problem(f"{key}.src_strategy", text, f"{key}.src_strategy=null")
    if step.format == "launcher":
        if step.prefix is not None:
            text = f"{step.prefix}: begins the names of rank files, which format=launcher does not write"
            yield Problem(f"{key}.prefix", f"{text}; set {key}.format=safetensors or ckpt")
        return

    for name, other in job.steps.items():
        reads = isinstance(other, Evaluate) and other.of == "transformed"
        reads = reads or (isinstance(other, Export) and other.src is None and comes_after(job, key, name))
        if reads:
            text = f"reads the output of {key}, but format={step.format} writes rank files, not a checkpoint"
            yield Problem(f"steps.{name}", text)
