"""``transform``: the run's checkpoint, in the layout that the step names, without torch."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.read import open_checkpoint
from launcher.checkpoint.target import target_strategy
from launcher.checkpoint.transform import Report, transform
from launcher.job.steps import Transform


def run(step: Transform, src: Path, dst: Path) -> Report:
    """``src`` and ``dst`` are checkpoint folders; ``dst`` is complete on return or not there."""
    target = target_strategy(
        open_checkpoint(src).strategy, nproc=step.nproc, stages=step.stages, shard_size=step.shard_size
    )
    return transform(src, dst, target, overwrite=step.overwrite)
