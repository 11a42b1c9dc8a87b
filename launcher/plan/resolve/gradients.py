"""Means or sums of gradients, local gradient norms, deterministic kernels."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.communication.buckets_and_gathers import Communication
from launcher.plan.sizes import Sizes
from launcher.plan.values.setting import Outcome, Setting
from launcher.plan.values.text import many

GRADIENTS_MEAN = "parallel.gradients_mean"


def gradients_mean_rows(job: Job, sizes: Sizes) -> Iterator[Setting]:
    """Yields the setting if gradients are summed."""
    if job.parallel.gradients_mean:
        return
    if sizes.replicas > 1:
        why = f"gradients are summed over the {sizes.replicas} data-parallel ranks"
        yield Setting(GRADIENTS_MEAN, "false", "applied", why)
    else:
        yield Setting(GRADIENTS_MEAN, "false", "satisfied", "one data-parallel rank")


LOSS_REPEATED_MEAN = "parallel.loss_repeated_mean"


def repeats(job: Job, sizes: Sizes, cut: bool) -> int:
    """Returns how often the loss counts.

    It counts once, or once for each rank of tp if these repeat it and take no mean. The ranks of tp do not
    repeat the loss if its classes are ``cut`` among them.
    """
    return 1 if job.parallel.loss_repeated_mean or cut else sizes.grid["tp"]


def loss_repeated_mean_rows(job: Job, sizes: Sizes, fused: Communication | None) -> Iterator[Setting]:
    """Yields the setting if it is ``false``: then the ranks that repeat a loss add it up, without a mean."""
    if job.parallel.loss_repeated_mean:
        return
    ranks = sizes.grid["tp"]
    cut = fused is not None and fused.loss_cut
    if repeats(job, sizes, cut) > 1:
        why = f"the loss that {ranks} tensor-parallel ranks repeat counts {ranks} times"
        yield Setting(LOSS_REPEATED_MEAN, "false", "applied", f"{why}: gradients are {ranks} times as large")
    elif ranks > 1:
        why = f"{ranks} tensor-parallel ranks compute one loss together, and none repeats it"
        yield Setting(LOSS_REPEATED_MEAN, "false", "satisfied", why)
    else:
        yield Setting(LOSS_REPEATED_MEAN, "false", "satisfied", "no rank repeats the loss of another")


LOCAL_NORM = "parallel.local_norm"


def problems(job: Job) -> Iterator[Problem]:
    """Yields a problem if ``device`` is set but norms are neither printed nor dumped."""
    local_norm = job.parallel.local_norm
    if local_norm.device and not local_norm.print and local_norm.dump is None:
        text = "true: has no effect, because norms are neither printed nor dumped"
        text += ": print them, or dump them to a folder"
        yield Problem(f"{LOCAL_NORM}.device", text, f"{LOCAL_NORM}.print=true")


def local_norm_rows(job: Job, sizes: Sizes, fused: Communication | None) -> Iterator[Setting]:
    """Yields a row for printed norms and a row for dumped norms."""
    local_norm = job.parallel.local_norm
    granularity = "one number per rank" if local_norm.device else "one number per parameter"
    often = "every step" if job.train.log_every == 1 else f"every {job.train.log_every} steps"
    status, why = _local_norm_outcome(job, sizes, fused)
    if local_norm.print:
        yield Setting(f"{LOCAL_NORM}.print", "true", status, f"{granularity}, {often}: {why}")
    if local_norm.dump is not None:
        yield Setting(
            f"{LOCAL_NORM}.dump", local_norm.dump, status, f"{granularity}, {often}, in rank<N>.jsonl: {why}"
        )


def _local_norm_outcome(job: Job, sizes: Sizes, fused: Communication | None) -> Outcome:
    """Returns what the norms measure.

    A local gradient is that of a rank's own samples, summed over micro batches, before any sum over ranks.
    """
    ranks = sizes.replicas
    before = "; the only data-parallel rank has all samples"
    if ranks > 1:
        before = f", before the sum over {many(ranks, 'data-parallel rank')}"
    piece = "; for operators over tp, norms of the rank's own piece or term" if sizes.grid["tp"] > 1 else ""
    why = f"norms of the gradients of a rank's own samples{before}{piece}"

    # from level2 on, a sharded gradient is reduced several times per step
    hsdp = job.parallel.hsdp
    if hsdp is None or hsdp.optimizer_level == "level1" or sizes.grid["dp_shard"] == 1:
        return "applied", why
    if sizes.micros * sizes.pieces == 1 or (fused is not None and not fused.groups):
        return "applied", why
    each = many(sizes.micros, "micro batch")
    if sizes.pieces > 1:
        each = f"{each} in {sizes.pieces} pieces"
    late = f"; {hsdp.optimizer_level} reduces sharded gradients after each of {each}, so their norm"
    return "degraded", f"{why}{late} is the root of the summed squares, not the norm of the sum"


def deterministic_rows(job: Job) -> Iterator[Setting]:
    """Yields the setting if it is on."""
    if job.deterministic:
        yield Setting("deterministic", "true", "applied", "torch picks deterministic kernels or fails")
