"""``calibrate``: times products, memory, links and overheads in turn, and writes a cluster file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import Problem
from launcher.extras.calibration.constants import Works
from launcher.extras.calibration.tiny_models import tiny_models
from launcher.job.schema.job import Job
from launcher.job.schema.paths import place
from launcher.job.schema.steps import Calibrate
from launcher.plan.certify_copy import Copy
from launcher.plan.plan import Plan
from launcher.steps.file_checks import FileChecks

if TYPE_CHECKING:
    from launcher.runtime.cluster.world import World
    from launcher.steps.model.shared_construction import SharedMetaModels

BUILDS = 1


def check(step: Calibrate, at: FileChecks) -> list[Problem]:
    return at.unwritable("to", step.to, "file")


def plan_problems(step: Calibrate, at: FileChecks, plan: Plan) -> list[Problem]:
    if plan.sizes.grid.size > 1:
        return []
    return [Problem(at.key, "links between ranks cannot be measured on 1 rank", "launch.nproc=2")]


def copies(step: Calibrate, job: Job, plan: Plan) -> tuple[tuple[Copy, Plan], ...]:
    """Returns small models to train, which show the overheads of a step."""
    from launcher.planner.plan_job import plan_job

    return tuple((copy, plan_job(copy.job)) for copy in tiny_models(job, plan.sizes.grid.size))


def run_copies(
    step: Calibrate, world: World, copies: Sequence[tuple[Copy, Plan]], folder: Path, drawn: SharedMetaModels
) -> str:
    """Writes the cluster file; returns its path, and how noisy the machine was.

    Raises ``RunError`` on every rank if it was too noisy.
    """
    from launcher.extras.calibration.timing_rounds import CalibrationSettings, calibrated
    from launcher.extras.calibration.training_steps import trainings

    settings = CalibrationSettings(Path(place(step.to, str(folder))), step.seconds, step.spread)
    (copy, replicas), (_, stages) = copies
    works = Works(copy.job.train.precision, replicas.estimate.work, stages.estimate.work)
    return calibrated(world, settings, [*trainings(world, copies, folder, drawn)], works)
