"""The user's classes that a request names: whether they exist, where they come from, what they accept."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from launcher.errors import Problem
from launcher.job.schema.components import ModelTarget, Target, apart
from launcher.job.schema.job import Job
from launcher.job.targets import absent, there

if TYPE_CHECKING:
    from launcher.planner.trace_model import ModelRead

NAME = "documents"
PLACED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def nowhere(job: Job) -> list[Problem]:
    """Problems of user classes in modules that do not exist; imports nothing."""
    keys = ("model", "data", "loss", "optim", "schedule")
    named = [(f"{k}._target_", getattr(job, k)) for k in keys] + [("metrics", m) for m in job.metrics]
    named += [(f"callbacks.{i}._target_", c) for i, c in enumerate(job.callbacks)]
    named += [(f"logger.others.{i}._target_", c) for i, c in enumerate(job.logger.others)]
    return [absent(key, s.target) for key, s in named if isinstance(s, Target) and not there(s.target)]


def files(job: Job) -> list[str]:
    """The Python modules that define the user's model. They may count or keep what they construct."""
    if not isinstance(job.model, Target):
        return []
    from torch import nn

    from launcher.job.targets import factory
    from launcher.parallel.model_state import module_globals as modules

    return modules.files(factory(job.model.target, job.security.allow, nn.Module, key="model._target_"))


def untaken(job: Job, read: ModelRead) -> Iterator[Problem]:
    """Refuses a model that does not take documents as its second input: it would be silently wrong."""
    asked = apart(job.data)
    if asked is None or not isinstance(job.model, ModelTarget):
        return
    takes = [p.name for p in signature(read.module.forward).parameters.values() if p.kind in PLACED]
    if takes[1:2] != [NAME]:
        text = f"{asked.value}: the forward of {job.model.target} takes ({', '.join(takes)})"
        text = f"{text}, and no documents to keep"
        cure = f"let it be forward(self, tokens, {NAME}), whose attention stays within documents"
        yield Problem(asked.key, f"{text} apart; {cure}", asked.cure)
