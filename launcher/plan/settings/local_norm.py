"""What a local norm is in each layout."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.cost.fusion import Fused
from launcher.plan.partition.sizes import Sizes
from launcher.plan.settings.setting import Setting, Status
from launcher.plan.values.text import many

KEY = "parallel.local_norm"


def refused(job: Job) -> Iterator[Problem]:
    """A form without a place to tell it."""
    asked = job.parallel.local_norm
    if asked.device and not asked.print and asked.dump is None:
        text = "true: says how norms are told, and they are told nowhere: print them, or dump them to a folder"
        yield Problem(f"{KEY}.device", text, f"{KEY}.print=true")


def resolve(job: Job, sizes: Sizes, fused: Fused | None = None) -> Iterator[Setting]:
    """A line for the console, a line for the folder."""
    asked = job.parallel.local_norm
    what = "one number a rank" if asked.device else "one a parameter"
    status, why = _meaning(job, sizes, fused)
    if asked.print:
        yield Setting(f"{KEY}.print", "true", status, f"{what}, {_often(job)}: {why}")
    if asked.dump is not None:
        yield Setting(f"{KEY}.dump", asked.dump, status, f"{what}, {_often(job)}, in rank<N>.jsonl: {why}")


def _often(job: Job) -> str:
    return "every step" if job.train.log_every == 1 else f"every {job.train.log_every} steps"


def _meaning(job: Job, sizes: Sizes, fused: Fused | None) -> tuple[Status, str]:
    """Local means: of the loss on a rank's own samples, summed over micro batches, before any sum over ranks."""
    hsdp, n = job.parallel.hsdp, sizes.replicas
    before = f", before the sum over {many(n, 'data-parallel rank')}" if n > 1 else "; one data-parallel rank has all"
    piece = "; of operators over tp, of the rank's own piece or term" if sizes.grid["tp"] > 1 else ""
    why = f"of the gradients of a rank's own samples{before}{piece}"
    if hsdp is None or hsdp.optimizer_level == "level1" or sizes.grid["dp_shard"] == 1:
        return "applied", why
    if sizes.micros * sizes.pieces == 1 or (fused is not None and not fused.groups):
        return "applied", why
    each = many(sizes.micros, "micro batch") + (f" in {sizes.pieces} pieces" if sizes.pieces > 1 else "")
    late = f"; {hsdp.optimizer_level} reduces sharded gradients after each of {each}, so of them"
    return "degraded", f"{why}{late} it is the root of the summed squares, not the norm of their sum"
