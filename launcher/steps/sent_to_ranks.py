"""The steps that all ranks run in one phase, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.job.schema.job import Job
from launcher.plan.certify_copy import Copy
from launcher.plan.drill import DrillFault
from launcher.plan.plan import Plan


@dataclass(frozen=True)
class RankSteps:
    """The steps ``names`` of one phase, and what every rank needs to run them.

    ``resume``: the checkpoint to resume from, if any; ``before``: the newest one in ``folder`` at the start,
    as a restarted attempt resumes from a newer one. ``copies``: what steps that do not use the run's model
    train instead; these steps run first, before the model is built. ``drill``: a fault that happens during
    these steps; ``undisturbed``: the same training repeated without it, in a separate folder. ``trial``: this
    is a trial of a layout, after which others follow.
    """

    job: Job
    plan: Plan
    folder: Path
    names: tuple[str, ...]
    resume: Path | None
    before: Path | None
    copies: Mapping[str, tuple[tuple[Copy, Plan], ...]]
    drill: DrillFault | None = None
    undisturbed: RankSteps | None = None
    trial: bool = False
