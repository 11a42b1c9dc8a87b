"""What becomes of each setting: applied, satisfied, degraded, or refused with the reason.

Each module here, or in the folders ``files`` and ``numbers``, has the name of its section of
``conf/config.yaml``: ``parallel.comm_fusion`` is in ``comm_fusion``. It defines those of the following
functions that its section needs: ``refused`` (problems that need no model), ``refused_for`` (problems with
this model) and ``rows`` (what the plan shows).
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.cost.fusion import Fused
from launcher.plan.partition import param_groups
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Sizes
from launcher.plan.refusals import drill, profiler
from launcher.plan.settings import (
    checkpoint,
    cluster,
    comm_fusion,
    compile,
    dataset_strategy,
    grid,
    hsdp,
    local_norm,
    mode,
    pipeline,
    recompute,
    shared,
    steps,
    transformer_opt,
)
from launcher.plan.settings.files import group_file, operator_strategy, param_strategy
from launcher.plan.settings.numbers import (
    deterministic,
    ema,
    gradients_mean,
    loss,
    loss_repeated_mean,
    metrics,
    packing,
    precision,
    watched_metrics,
)
from launcher.plan.values.recomputed import Recomputed
from launcher.plan.values.setting import Setting

__all__ = [
    "checkpoint",
    "cluster",
    "compile",
    "dataset_strategy",
    "device_matrix",
    "hsdp",
    "pipeline_stage_config",
    "recompute",
    "steps",
    "transformer_opt",
]


def sizes(job: Job) -> tuple[Sizes | None, list[Problem]]:
    """Returns the sizes of ``job``, and all problems of its settings that do not depend on the model."""
    problems = [*mode.refused(job), *checkpoint.refused(job), *cluster.refused(job)]
    got, wrong = grid.sizes(job)
    problems += wrong
    problems += pipeline.refused(job, got)
    problems += steps.refused(job, got)
    problems += dataset_strategy.refused(job, got)
    problems += transformer_opt.refused(job, got)
    problems += local_norm.refused(job)
    problems += compile.refused(job, got)
    problems += packing.refused(job)
    problems += metrics.refused(job)
    problems += ema.refused(job)
    problems += watched_metrics.refused(job, got)
    problems += drill.problems(job, got)
    problems += profiler.problems(job, got)
    return got, problems


def refused_for(job: Job, params: tuple[Placed, ...]) -> Iterator[Problem]:
    """Yields problems of settings that name parameters of the model."""
    yield from shared.refused_for(job, params)
    yield from ema.refused_for(job, params)
    yield from comm_fusion.refused_for(job, params)
    yield from param_groups.refused_for(job.optim, params)


def rows(
    job: Job, sizes: Sizes, fused: Fused | None = None, recomputed: tuple[Recomputed, ...] = ()
) -> Iterator[Setting]:
    """Yields the settings that are not at their default, as the plan shows them.

    ``fused``: the plan's fused collectives; ``None`` before the model is read. ``recomputed``: the modules
    that are recomputed.
    """
    yield from deterministic.rows(job)
    yield from packing.rows(job)
    yield from loss.rows(job)
    yield from metrics.rows(job)
    yield from pipeline.rows(job, sizes)
    yield from recompute.rows(job, recomputed)
    yield from hsdp.rows(job, sizes, fused)
    yield from gradients_mean.rows(job, sizes)
    yield from dataset_strategy.rows(job, sizes)
    yield from shared.rows(job)
    yield from param_strategy.rows(job)
    yield from operator_strategy.rows(job)
    yield from group_file.rows(job)
    yield from local_norm.rows(job, sizes, fused)
    yield from transformer_opt.rows(job, sizes, fused)
    yield from checkpoint.rows(job)
    yield from ema.rows(job)
    yield from watched_metrics.rows(job)
    yield from precision.rows(job, sizes, fused)
    yield from comm_fusion.rows(job, sizes, fused)
    yield from loss_repeated_mean.rows(job, sizes, fused)
    yield from param_groups.rows(job.optim, fused.params if fused else ())
