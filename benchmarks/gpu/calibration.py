"""Runs ``steps=[calibrate]`` on the device, and plans with the cluster that it writes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.lab import PartContext
from benchmarks.gpu.request import FULL, SELECTIVE, words
from benchmarks.gpu.starts import several
from launcher.job.compose import compose
from launcher.planner.plan_job import plan_job

RANKS = 2
"""One rank has no links to measure; two share the device, so the measured speeds are those of half of it."""


def calibrate(context: PartContext) -> None:
    """Calibrate on two ranks; report their file, and what plans of one rank predict with it."""
    compose(words(context))
    context.wait_for_turn()
    written = context.folder / "conf" / "cluster" / "lab.yaml"
    written.parent.mkdir(parents=True)
    seconds = 5 if context.dry else 20  # a dry run may be noisy
    several(
        context,
        RANKS,
        "recipe=lm_single",
        "data=random_tokens",
        "train.precision=bf16",
        "steps=[calibrate]",
        "parallel.grid.dp_replicate=2",
        f"steps.calibrate.to={written}",
        f"steps.calibrate.seconds={seconds}",
        f"steps.calibrate.spread={100 if context.dry else 1}",
    )
    context.report(cluster=written.read_text(), planned_ms=planned_ms(context, written.parents[1]))


def planned_ms(context: PartContext, config_dir: Path) -> dict[str, float | None]:
    """Return the milliseconds of a step that each plan predicts with that cluster."""
    out: dict[str, float | None] = {}
    for name, more in {"eager": (), "recompute full": (FULL,), "recompute selective": (SELECTIVE,)}.items():
        plan = plan_job(compose(words(context, *more, "cluster=lab"), config_dir=config_dir).job)
        step = plan.estimate.step
        out[name] = None if step is None else round(step.seconds * 1e3, 1)
    return out
