"""Whether a request cuts operators over device matrices, and which settings that excludes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import lcm, prod
from shlex import quote
from typing import Any

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.optim import Adafactor, Muon
from launcher.plan.resolve import mode
from launcher.plan.schedule.schedules import RULES
from launcher.plan.tensor_parallel import strategy_reader
from launcher.plan.values.resolved import OVER_TP, EngineChoice
from launcher.plan.values.text import many

OPERATORS = "parallel.operators"


def over_slices(job: Job, engine: EngineChoice) -> EngineChoice | None:
    """Chooses device matrices for slices that are valid for one tp axis, but do not fit this model.

    ``None`` if ``engine`` is device matrices already, if a strategy has anything but slices, or if other
    settings forbid it.
    """
    par = job.parallel
    if engine.over_matrices or not par.operators or par.grid.tp is not None:
        return None
    written = strategy_reader.strategies(par.operators)
    if len(written) < len(par.operators) or not all(s.sliced for s in written.values()):
        return None
    out = EngineChoice("device_matrix", "the slices fit no tp axis of this model")
    wrong: list[Problem] = []
    wrong += problems(job, ranks(job, out, wrong))
    return None if wrong else out


def choose_engine(job: Job) -> EngineChoice:
    """Chooses how operators are cut, from the settings alone.

    Device matrices are chosen if strategies are searched for, or if the written ones do not fit a single tp
    axis in addition to the data-parallel ranks.
    """
    why = _why_matrices(job)
    return EngineChoice("device_matrix", why) if why else OVER_TP


def _why_matrices(job: Job) -> str:
    """Returns the reason for device matrices; empty if one tp axis will do."""
    par = job.parallel
    if mode.searches(job):
        return f"{mode.MODE_KEY}={par.mode} searches for strategies"
    if _other_dims(par.dataset_strategy):
        return "parallel.dataset_strategy cuts other dims than the samples, or names axes"
    written = strategy_reader.strategies(par.operators).values()
    if any(s.over_matrix for s in written):
        return f"{OPERATORS} has device matrices"
    if par.grid.tp is not None:
        return ""

    # what the slices imply
    tp, clash = strategy_reader.degree(par.operators)
    if tp is None and written and all(s.sliced for s in written):
        return f"the slices of {OPERATORS} imply no size of tp"
    if clash:
        return f"{OPERATORS} has different numbers of slices: {clash}"
    if _other_batches(job, written, tp or 1):
        return f"{OPERATORS} cuts samples into slices that match no axis"
    return ""


def _other_dims(strategy: Any) -> bool:
    """Returns true if a dataset strategy cuts other dims than the samples, or names axes."""
    if isinstance(strategy, str):
        return False
    return isinstance(strategy, Mapping) or any(n > 1 for dims in strategy for n in dims[1:])


def _other_batches(job: Job, written: Iterable[strategy_reader.WrittenStrategy], tp: int) -> bool:
    """Returns true if an operator cuts samples into a number of slices not among 1, dp, tp and dp * tp."""
    if job.launch.nproc is None:
        return False
    dp = job.launch.nproc * job.launch.nnodes // (job.parallel.pipeline.stages * tp)
    known = {1, dp, tp, dp * tp}
    first = (s.inputs[0][0] for s in written if s.inputs and s.inputs[0])
    return any(isinstance(n, int) and n not in known for n in first)


def least(job: Job) -> int:
    """Returns the fewest ranks of a stage that fit all strategies."""
    sizes = [1]
    for strategy in strategy_reader.strategies(job.parallel.operators).values():
        for counts in (strategy.matrix, *strategy.inputs):
            if all(type(n) is int and n > 0 for n in counts):
                sizes.append(prod(counts))
    return lcm(*sizes)


def ranks(job: Job, engine: EngineChoice, problems: list[Problem]) -> int | None:
    """Returns the number of ranks of a stage.

    Returns ``None``, with a problem added, if stages do not divide the ranks.
    """
    pp, launch = job.parallel.pipeline.stages, job.launch
    if launch.nproc is None:
        return lcm(pp * least(job), engine.ranks_at_least, launch.nnodes) // pp
    world = launch.nproc * launch.nnodes
    if world % pp:
        nodes = "" if launch.nnodes == 1 else f"{many(world, 'rank')} on {launch.nnodes} nodes "
        text = f"{launch.nproc}: {nodes}cannot be divided evenly into {many(pp, 'pipeline stage')}"
        problems.append(
            Problem("launch.nproc", text, f"launch.nproc={-(-world // pp) * pp // launch.nnodes}")
        )
        return None
    return world // pp


def problems(job: Job, size: int | None) -> Iterator[Problem]:
    """Yields problems for settings that device matrices over the ``size`` ranks of a stage do not support."""
    par = job.parallel
    if mode.searches(job) and size == 1:
        text = f"{par.mode} has nothing to decide: each stage has one rank"
        yield Problem(mode.MODE_KEY, text, f"{mode.MODE_KEY}=semi_auto")
    for axis, n in (("dp_replicate", par.grid.dp_replicate), ("dp_shard", par.grid.dp_shard)):
        if n not in (None, 1):
            text = (
                f"{n}: has no meaning with device matrices, where each operator divides all ranks of a stage"
            )
            text += " in its own way"
            yield Problem(f"parallel.grid.{axis}", text, quote(f"~parallel.grid.{axis}"))
    if par.grid.tp not in (None, size) and size is not None:
        text = f"{par.grid.tp}: operators are cut over all {size} ranks of a stage"
        yield Problem("parallel.grid.tp", text, quote("~parallel.grid.tp"))
    if par.recompute is not None:
        text = "operators over device matrices cannot be recomputed yet"
        yield Problem("parallel.recompute", text, quote("~parallel.recompute"))
    if job.train.compile is not None:
        text = "operators over device matrices are not compiled yet"
        yield Problem("train.compile", text, quote("~train.compile"))
    if isinstance(job.optim, Adafactor | Muon):
        text = f"{job.optim.name}: a step needs full tensors, but each operator cuts them in its own way"
        yield Problem("optim.name", text, "optim=adamw")
    if par.pipeline.seq_chunks > 1:
        text = f"{par.pipeline.seq_chunks}: operators over device matrices do not cut sequences"
        yield Problem("parallel.pipeline.seq_chunks", text, "parallel.pipeline.seq_chunks=1")
    rule = RULES.get(par.pipeline.scheduler)
    if rule is not None and rule.split and par.pipeline.stages > 1:
        text = f"{par.pipeline.scheduler}: a backward over device matrices cannot be split in two"
        yield Problem("parallel.pipeline.scheduler", text, "parallel.pipeline.scheduler=1f1b")
