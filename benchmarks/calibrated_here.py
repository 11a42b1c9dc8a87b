"""Calibrates this machine in rounds that a benchmark runs between its own measurements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from launcher.extras.calibration import calibrate
from launcher.extras.calibration.constants import MeasuredMachine, Round, Works, cluster, fitted, typical
from launcher.job.compose import compose
from launcher.job.schema.cluster import Cluster
from launcher.job.schema.steps import Calibrate
from launcher.plan.certify_copy import Copy
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.start_and_restart import run_ranks
from launcher.steps.model.shared_construction import SharedMetaModels

RANKS = 4
NAME = "this machine, calibrated in between"


def rounds(seconds: float) -> tuple[list[Round], MeasuredMachine]:
    """Return the machine, and as many calibration rounds on fresh ranks as fit in ``seconds``."""
    job = compose(["recipe=lm_single", f"launch.nproc={RANKS}", "steps=[calibrate]"]).job
    step = job.steps["calibrate"]
    assert isinstance(step, Calibrate)
    copies = calibrate.copies(step, job, plan_job(job))
    with TemporaryDirectory() as folder:
        work = partial(_work, seconds=seconds, copies=copies, folder=Path(folder))
        return run_ranks(work, RANKS)[0]


def _work(
    world: World, seconds: float, copies: Sequence[tuple[Copy, Plan]], folder: Path
) -> tuple[list[Round], MeasuredMachine]:
    from launcher.extras.calibration.timing_rounds import machine_of, measured, samples
    from launcher.extras.calibration.training_steps import trainings

    (copy, replicas), (_, stages) = copies
    works = Works(copy.job.train.precision, replicas.estimate.work, stages.estimate.work)
    machine = machine_of(world, works, NAME)
    timed = [*samples(world, machine), *trainings(world, copies, folder, SharedMetaModels())]
    return measured(world, seconds, timed), machine


def calibrated(found: Sequence[Round], machine: MeasuredMachine) -> Cluster:
    """Return the cluster that is fitted to all rounds."""
    return cluster(fitted(typical(found), machine), machine)
