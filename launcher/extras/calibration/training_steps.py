"""Times tiny models in training: steps of the real loop that are almost only overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launcher.extras.calibration.constants import Trained
from launcher.extras.calibration.kernels import TimedWork
from launcher.plan.certify_copy import Copy
from launcher.plan.plan import Plan
from launcher.runtime.cluster.world import World
from launcher.runtime.training.loop import step
from launcher.steps.model import build_session
from launcher.steps.model.shared_construction import SharedMetaModels

SEVERAL = 0.15
"""Seconds of steps to time together, because the time that ranks wait for each other varies."""


def trainings(
    world: World, copies: Sequence[tuple[Copy, Plan]], folder: Path, drawn: SharedMetaModels
) -> Iterator[TimedWork]:
    """Yields the timed steps of ``copies`` on replicas and on stages; all ranks call it."""
    layouts = (Trained("replicas"), Trained("stages"))
    for layout, (copy, plan) in zip(layouts, copies, strict=True):
        work = _step(world, copy, plan, folder, drawn)
        yield TimedWork(layout, work, joint=True, least=SEVERAL)


def _step(
    world: World, copy: Copy, plan: Plan, folder: Path, drawn: SharedMetaModels
) -> Callable[[], object]:
    live = build_session.build(world, copy.job, plan, folder, drawn=drawn)

    def one() -> None:
        step(live, copy.job.train.clip_norm)
        live.step += 1

    return one
