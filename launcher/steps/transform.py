"""``transform``: a checkpoint in the layout that the step names, without torch."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.follow import followed
from launcher.checkpoint.given import given, of_whole, whole_specs
from launcher.checkpoint.read import Reader, open_checkpoint
from launcher.checkpoint.strategy import Strategy, match
from launcher.checkpoint.target import target_strategy
from launcher.checkpoint.transform import Report, transform
from launcher.checkpoint.transform_plan import plan_transform
from launcher.job.steps import Transform
from launcher.plan.saving import ANYONE, Trust


def target(step: Transform, src: Strategy) -> Strategy:
    """The layout asked for, by a strategy file, which must be of the tensors of ``src``, or in the job's words."""
    if step.strategy is None:
        return target_strategy(src, nproc=step.nproc, stages=step.stages, shard_size=step.shard_size)
    found = given("steps.transform.strategy", step.strategy)
    assert found is not None
    try:
        to = followed(of_whole(found, whole_specs(src)), src)
        match(src, to)
    except ValueError as error:
        raise ValueError(f"{step.strategy}: {error}") from error
    return to


def run(step: Transform, src: Path, dst: Path, key: str | None = None, trust: Trust = ANYONE) -> Report:
    """``src`` and ``dst`` are checkpoint folders; ``dst`` is complete on return or not there. ``key`` is its own."""
    to = target(step, open_checkpoint(src, trust).strategy)
    return transform(src, dst, to, overwrite=step.overwrite, key=key, workers=step.workers, trust=trust)


def check(step: Transform, src: Path, trust: Trust) -> None:
    """Raises as ``run`` does for what the heads of the files in ``src`` tell. Writes nothing."""
    checkpoint = open_checkpoint(src, trust)
    target(step, checkpoint.strategy)
    Reader(checkpoint).check_headers()


def preview(step: Transform, src: Path, trust: Trust) -> str:
    """What ``run`` would read and write; nothing is written. Raises as it does."""
    to = target(step, open_checkpoint(src, trust).strategy)
    plan = plan_transform(src, to, workers=step.workers, trust=trust)
    return f"{plan.text()}{plan.detail()}".removesuffix("\n")
