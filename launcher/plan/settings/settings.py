"""What becomes of each setting: applied, satisfied, degraded, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Hsdp, Pipeline
from launcher.plan.cost.fusion import Fused
from launcher.plan.cost.memory import bytes_text
from launcher.plan.partition.sizes import Sizes
from launcher.plan.settings import saving, switches
from launcher.plan.settings.setting import Setting as Setting

LATER = "not available yet"


def refused(job: Job) -> list[Problem]:
    """Settings that name something this version cannot do. Never accepted in silence."""
    return [
        *(Problem(key, f"{value} is {LATER}", quote(cure)) for key, value, cure in _later(job)),
        *saving.refused(job),
    ]


def _later(job: Job) -> Iterator[tuple[str, str, str]]:
    par = job.parallel
    if par.mode != "semi_auto":
        yield "parallel.mode", par.mode, "parallel.mode=semi_auto"


LEVELS = {
    "level1": "weights and optimizer state sharded; gradients reduced once a step",
    "level2": "gradients too: reduced after every micro batch",
    "level3": "weights dropped after forward and gathered again for backward too",
}


def resolve(job: Job, sizes: Sizes, fused: Fused | None = None) -> tuple[Setting, ...]:
    """What the switches that are not at their default come to in this layout.

    ``fused`` is what the plan sends together; ``None`` before the model is read.
    """
    return tuple(_resolved(job, sizes, fused))


def _resolved(job: Job, sizes: Sizes, fused: Fused | None) -> Iterator[Setting]:
    par, n = job.parallel, sizes.replicas
    if job.deterministic:
        yield Setting("deterministic", "true", "applied", "torch picks deterministic kernels or fails")
    if par.pipeline.stages == 1 and par.pipeline.scheduler not in ("1f1b", "gpipe", "auto"):
        why = "one stage has no bubble to fill: as 1f1b"
        yield Setting("parallel.pipeline.scheduler", par.pipeline.scheduler, "satisfied", why)
    if par.pipeline.interleave:
        key = "parallel.pipeline.interleave"
        if sizes.chunks > 1:
            yield Setting(key, "true", "applied", f"{sizes.chunks} virtual stages a rank")
        else:
            yield Setting(key, "true", "satisfied", _why_not_interleaved(par.pipeline))
    if par.pipeline.less_memory:
        key = "parallel.pipeline.less_memory"
        if sizes.chunks > 1:
            yield Setting(key, "true", "applied", "a rank runs ahead by one forward; each transfer is waited for")
        else:
            yield Setting(key, "true", "satisfied", _why_not_interleaved(par.pipeline))
    if par.pipeline.output_broadcast:
        key = "parallel.pipeline.output_broadcast"
        if par.pipeline.stages > 1:
            why = "evaluation sends what the last stage makes to every stage, one broadcast a batch"
            yield Setting(key, "true", "applied", why)
        else:
            yield Setting(key, "true", "satisfied", "one stage")
    if par.pipeline.loss_reduction == "sum":
        key = "parallel.pipeline.loss_reduction"
        if sizes.micros > 1:
            yield Setting(key, "sum", "applied", f"loss and gradients are summed over {sizes.micros} micro batches")
        else:
            yield Setting(key, "sum", "satisfied", "one micro batch")
    if par.hsdp is not None:
        level, key = par.hsdp.optimizer_level, "parallel.hsdp.optimizer_level"
        if sizes.grid["dp_shard"] == 1:
            yield Setting(key, level, "satisfied", "one rank on the shard axis; there is nobody to share with")
        elif fused is not None and not fused.groups:
            yield Setting(key, level, "degraded", _why_not_sharded(par.hsdp, fused))
        else:
            often = "every piece of a micro batch" if sizes.pieces > 1 else "every micro batch"
            yield Setting(key, level, "applied", LEVELS[level].replace("every micro batch", often))
    if not par.gradients_mean:
        key = "parallel.gradients_mean"
        if n > 1:
            yield Setting(key, "false", "applied", f"gradients are summed over the {n} data-parallel ranks")
        else:
            yield Setting(key, "false", "satisfied", "one data-parallel rank")
    yield from switches.resolve(job, sizes, fused)
    yield from saving.resolve(job)


def _why_not_interleaved(pipe: Pipeline) -> str:
    return "one stage has no bubble to shrink" if pipe.stages == 1 else "one chunk a rank"


def _why_not_sharded(hsdp: Hsdp, fused: Fused) -> str:
    largest = max((p.spec.nbytes for p in fused.params if not p.buffer), default=0)
    if largest < hsdp.threshold * 1024:
        why = f"the largest has {bytes_text(largest)}, parallel.hsdp.threshold is {hsdp.threshold} KB"
    else:
        why = "none of them can be cut over the ranks that share the weights"
    return f"no parameter is sharded: {why}; every rank keeps all of them whole"
