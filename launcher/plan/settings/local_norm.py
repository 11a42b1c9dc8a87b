"""``parallel.local_norm``: norms of each rank's own gradients, and what they measure in this layout."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.cost.fusion import Fused
from launcher.plan.partition.sizes import Sizes
from launcher.plan.values.setting import Outcome, Setting
from launcher.plan.values.text import many

KEY = "parallel.local_norm"


def refused(job: Job) -> Iterator[Problem]:
    """Yields a problem if ``device`` is set but norms are neither printed nor dumped."""
    asked = job.parallel.local_norm
    if asked.device and not asked.print and asked.dump is None:
        text = "true: says how norms are told, and they are told nowhere"
        text += ": print them, or dump them to a folder"
        yield Problem(f"{KEY}.device", text, f"{KEY}.print=true")


def rows(job: Job, sizes: Sizes, fused: Fused | None) -> Iterator[Setting]:
    """Yields a row for printed norms and a row for dumped norms."""
    asked = job.parallel.local_norm
    what = "one number a rank" if asked.device else "one a parameter"
    often = "every step" if job.train.log_every == 1 else f"every {job.train.log_every} steps"
    status, why = _outcome(job, sizes, fused)
    if asked.print:
        yield Setting(f"{KEY}.print", "true", status, f"{what}, {often}: {why}")
    if asked.dump is not None:
        yield Setting(f"{KEY}.dump", asked.dump, status, f"{what}, {often}, in rank<N>.jsonl: {why}")


def _outcome(job: Job, sizes: Sizes, fused: Fused | None) -> Outcome:
    """Returns what the norms measure.

    A local gradient is that of a rank's own samples, summed over micro batches, before any sum over ranks.
    """
    ranks = sizes.replicas
    before = "; one data-parallel rank has all"
    if ranks > 1:
        before = f", before the sum over {many(ranks, 'data-parallel rank')}"
    piece = "; of operators over tp, of the rank's own piece or term" if sizes.grid["tp"] > 1 else ""
    why = f"of the gradients of a rank's own samples{before}{piece}"

    # from level2 on, a sharded gradient is reduced several times per step
    hsdp = job.parallel.hsdp
    if hsdp is None or hsdp.optimizer_level == "level1" or sizes.grid["dp_shard"] == 1:
        return "applied", why
    if sizes.micros * sizes.pieces == 1 or (fused is not None and not fused.groups):
        return "applied", why
    each = many(sizes.micros, "micro batch")
    if sizes.pieces > 1:
        each = f"{each} in {sizes.pieces} pieces"
    late = f"; {hsdp.optimizer_level} reduces sharded gradients after each of {each}, so of them"
    return "degraded", f"{why}{late} it is the root of the summed squares, not the norm of their sum"
