"""Which scheduler goes with which other settings."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.partition.sizes import Sizes
from launcher.plan.schedule.schedules import RULES, Rule

PIPE = "parallel.pipeline"
LEVEL = "parallel.hsdp.optimizer_level"


def illegal(job: Job, sizes: Sizes | None) -> list[Problem]:
    """Every reason why the scheduler asked for cannot run this job."""
    pipe = job.parallel.pipeline
    if pipe.stages == 1:
        return list(_one_stage(job))
    found = list(_less_memory(job))
    if pipe.scheduler != "auto":
        found += _illegal(job, sizes, RULES[pipe.scheduler])
    return found


def _one_stage(job: Job) -> Iterator[Problem]:
    pipe, key = job.parallel.pipeline, f"{PIPE}.seq_chunks"
    if pipe.seq_chunks > 1:
        text = f"{pipe.seq_chunks}: pieces of a sequence fill the bubble between stages, and there is one stage"
        yield Problem(key, text, f"{key}=1")


def _less_memory(job: Job) -> Iterator[Problem]:
    pipe, key = job.parallel.pipeline, f"{PIPE}.less_memory"
    if pipe.less_memory and pipe.scheduler != "1f1b":
        yield Problem(key, f"true: is a form of interleaved 1f1b, not of {pipe.scheduler}", f"{key}=false")
    elif pipe.less_memory and not (pipe.interleave and pipe.chunks > 1):
        text = "true: has no effect without several virtual stages a rank"
        yield Problem(key, text, f"{PIPE}.interleave=true {PIPE}.chunks={max(pipe.chunks, 2)}")


def candidates(job: Job, sizes: Sizes) -> tuple[str, ...]:
    """The schedulers that ``auto`` may take: what is legal for this job with as many virtual stages a rank."""
    pipe = job.parallel.pipeline
    if pipe.stages == 1:
        return ("1f1b",)
    out = []
    for name, rule in RULES.items():
        asked = job.model_copy(
            update={
                "parallel": job.parallel.model_copy(update={"pipeline": pipe.model_copy(update={"scheduler": name})})
            }
        )
        fits = sizes.chunks == 2 if rule.v else sizes.chunks == 1 if rule.single else True
        enough = not rule.full or sizes.micros >= sizes.virtual
        if fits and enough and rule.seq == (pipe.seq_chunks > 1) and not any(_illegal(asked, sizes, rule)):
            out.append(name)
    return tuple(out)


def _illegal(job: Job, sizes: Sizes | None, rule: Rule) -> Iterator[Problem]:
    pipe, hsdp = job.parallel.pipeline, job.parallel.hsdp
    if rule.single and pipe.interleave:
        text = f"true: {pipe.scheduler} has one stage a rank"
        yield Problem(f"{PIPE}.interleave", text, f"{PIPE}.interleave=false")
    if rule.v and pipe.interleave and pipe.chunks != 2:
        text = f"{pipe.chunks}: {pipe.scheduler} has exactly two virtual stages a rank"
        yield Problem(f"{PIPE}.chunks", text, f"{PIPE}.chunks=2")
    yield from _pieces(job, rule)
    if rule.split and hsdp is not None and hsdp.optimizer_level == "level3" and (sizes is None or sharing(sizes)):
        yield Problem(LEVEL, f"level3: {DROPPED.format(pipe.scheduler)}", f"{LEVEL}=level2")


def _pieces(job: Job, rule: Rule) -> Iterator[Problem]:
    """What MindSpore asks of its sequence pipelines, and that no other cuts sequences."""
    pipe, key = job.parallel.pipeline, f"{PIPE}.seq_chunks"
    ranks, pieces = pipe.stages, pipe.seq_chunks
    if pieces > 1 and not rule.seq:
        text = f"{pieces}: {pipe.scheduler} does not cut sequences"
        yield Problem(key, text, f"{PIPE}.scheduler=seqpipe")
    if rule.several and not (pipe.interleave and pipe.chunks > 1):
        text = f"{pipe.scheduler}: needs several virtual stages a rank"
        yield Problem(f"{PIPE}.scheduler", text, f"{PIPE}.interleave=true {PIPE}.chunks={max(pipe.chunks, 2)}")
    if rule.several and pieces > ranks:
        text = f"{pieces}: {pipe.scheduler} takes as many pieces together as there are stages, {ranks}"
        yield Problem(key, text, f"{key}={ranks}")
    if pipe.scheduler == "seqsmartvpp" and ranks % 2:
        text = f"seqsmartvpp: needs an even number of stages, not {ranks}"
        yield Problem(f"{PIPE}.scheduler", text, f"{PIPE}.scheduler=seqvpp")


DROPPED = (
    "drops the weights after each forward, and {} computes weight gradients after the weights were dropped again: "
    "FSDP2 would lose them without a word"
)


def sharing(sizes: Sizes) -> bool:
    """Whether weights are sharded at all."""
    return sizes.grid["dp_shard"] > 1
