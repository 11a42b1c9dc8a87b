"""Classes of the user's own that a request names: whether they are there, and which modules they are from."""

from __future__ import annotations

from launcher.errors import Problem
from launcher.job.schema.components import Target
from launcher.job.schema.job import Job
from launcher.job.targets import absent, there


def nowhere(job: Job) -> list[Problem]:
    """Classes of the user's own in modules that are not there; nothing is imported."""
    keys = ("model", "data", "loss", "optim", "schedule")
    named = [(f"{k}._target_", getattr(job, k)) for k in keys] + [("metrics", m) for m in job.metrics]
    named += [(f"callbacks.{i}._target_", c) for i, c in enumerate(job.callbacks)]
    named += [(f"logger.others.{i}._target_", c) for i, c in enumerate(job.logger.others)]
    return [absent(key, s.target) for key, s in named if isinstance(s, Target) and not there(s.target)]


def files(job: Job) -> list[str]:
    """The Python modules that a model of the user's own is from; they may count or keep what is built."""
    if not isinstance(job.model, Target):
        return []
    from torch import nn

    from launcher.job.targets import factory
    from launcher.parallel.model_state import module_globals as modules

    return modules.files(factory(job.model.target, job.security.allow, nn.Module, key="model._target_"))
