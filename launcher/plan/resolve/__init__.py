"""The effect of each setting: applied, satisfied, degraded, or refused with the reason.

A module has the name of its section of ``conf/config.yaml``, or of what small sections have in common:
``parallel.comm_fusion`` is in ``comm_fusion``. It defines those of the following functions that a section
needs: ``problems`` (those that need no model), ``param_problems`` (those with this model) and
``rows`` (what the plan shows); the rows of ``gradients`` stand apart in the plan, and have a function each.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan import drill
from launcher.plan.communication.buckets_and_gathers import Communication
from launcher.plan.cut import param_groups
from launcher.plan.cut.tensor_placement import Placed
from launcher.plan.memory import fits_cluster
from launcher.plan.resolve import (
    checkpoint,
    comm_fusion,
    compile,
    dataset_strategy,
    gradients,
    grid,
    hsdp,
    layout_files,
    loss,
    metrics,
    mode,
    monitored_metrics,
    packing,
    pipeline,
    precision,
    profiler,
    recompute,
    steps,
    ties,
    transformer_opt,
    weight_average,
)
from launcher.plan.sizes import Sizes
from launcher.plan.values.recomputed_module import Recomputed
from launcher.plan.values.resolved import EngineChoice, SwitchesFile
from launcher.plan.values.setting import Setting

__all__ = [
    "checkpoint",
    "compile",
    "dataset_strategy",
    "device_matrix",
    "encryption",
    "hsdp",
    "mode",
    "recompute",
    "stage_config",
    "steps",
    "transform_targets",
    "transformer_opt",
]


def sizes(
    job: Job, switches_file: SwitchesFile | None = None, engine: EngineChoice | None = None
) -> tuple[Sizes | None, list[Problem]]:
    """Returns the sizes of ``job``, and all problems of its settings that do not depend on the model.

    ``switches_file``: the file that has switches of ``transformer_opt``. ``engine``: how operators are cut,
    if files or the model decided it.
    """
    problems = [*mode.problems(job), *checkpoint.problems(job), *fits_cluster.problems(job)]
    got, wrong = grid.sizes(job, engine)
    problems += wrong
    problems += pipeline.problems(job, got)
    problems += steps.problems(job, got)
    problems += dataset_strategy.problems(job, got)
    problems += transformer_opt.problems(job, got, switches_file)
    problems += gradients.problems(job)
    problems += compile.problems(job, got)
    problems += packing.problems(job)
    problems += metrics.problems(job)
    problems += weight_average.problems(job)
    problems += monitored_metrics.problems(job, got)
    problems += drill.problems(job, got)
    problems += profiler.problems(job, got)
    return got, problems


def param_problems(job: Job, params: tuple[Placed, ...]) -> Iterator[Problem]:
    """Yields problems of settings that name parameters of the model."""
    yield from ties.param_problems(job, params)
    yield from weight_average.param_problems(job, params)
    yield from comm_fusion.param_problems(job, params)
    yield from param_groups.param_problems(job.optim, params)


def rows(
    job: Job, sizes: Sizes, fused: Communication | None = None, recomputed: tuple[Recomputed, ...] = ()
) -> Iterator[Setting]:
    """Yields the settings that are not at their default, as the plan shows them.

    ``fused``: the plan's fused collectives; ``None`` before the model is read. ``recomputed``: the modules
    that are recomputed.
    """
    yield from gradients.deterministic_rows(job)
    yield from packing.rows(job)
    yield from loss.rows(job)
    yield from metrics.rows(job)
    yield from pipeline.rows(job, sizes)
    yield from recompute.rows(job, recomputed)
    yield from hsdp.rows(job, sizes, fused)
    yield from gradients.gradients_mean_rows(job, sizes)
    yield from dataset_strategy.rows(job, sizes)
    yield from ties.rows(job)
    yield from layout_files.rows(job)
    yield from gradients.local_norm_rows(job, sizes, fused)
    yield from transformer_opt.rows(job, sizes, fused)
    yield from checkpoint.rows(job)
    yield from weight_average.rows(job)
    yield from monitored_metrics.rows(job)
    yield from precision.rows(job, sizes, fused)
    yield from comm_fusion.rows(job, sizes, fused)
    yield from gradients.loss_repeated_mean_rows(job, sizes, fused)
    yield from param_groups.rows(job.optim, fused.params if fused else ())
