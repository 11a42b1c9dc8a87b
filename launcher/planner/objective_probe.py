"""Tries the user's losses and metrics on the first samples of the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.errors import Problem
from launcher.job.schema.components import Target
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.values.facts import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


def problems(job: Job, made: Plan, target: TensorSpec) -> Iterator[Problem]:
    """Problems of each loss and metric. Raises ``RequestError`` if one cannot be constructed or called."""
    import torch

    from launcher.objective.own import OwnLoss, OwnMetric
    from launcher.objective.probe import Tried, problem

    allow = job.security.allow
    output = tuple(replace(t, shape=t.shape[1:]) for t in made.output)
    pieces, targets, cpu = bool(made.pieces), _targets(job, target), torch.device("cpu")
    if isinstance(job.loss, Target):
        loss = OwnLoss(job.loss, allow, cpu)
        tried = Tried("loss._target_", job.loss.target, loss.pair, output, targets, pieces, made.output_keys)
        found = problem(tried, loss.count)
        yield from [found] if found else []
    for one in job.metrics:
        if isinstance(one, Target):
            metric = OwnMetric(one, allow, cpu)
            found = problem(
                Tried("metrics", one.target, metric.pair, output, targets, pieces, made.output_keys)
            )
            yield from [found] if found else []


def _targets(job: Job, spec: TensorSpec) -> Tensor:
    """Targets of the first samples; for built-in data, which planning does not open, class ids 0 and 1."""
    import numpy as np
    import torch

    from launcher.objective.probe import SAMPLES

    if isinstance(job.data, Target):
        from launcher.data.open import open_data

        source = open_data(job.data, seed=job.seed, allow=job.security.allow).train
        return source.targets(np.arange(min(SAMPLES, len(source))))
    count = np.prod((SAMPLES, *spec.shape[1:]), dtype=int)
    return (torch.arange(count) % 2).view(SAMPLES, *spec.shape[1:])
