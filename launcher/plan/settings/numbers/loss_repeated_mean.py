"""``parallel.loss_repeated_mean``: whether a loss that several ranks compute counts once."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema.job import Job
from launcher.plan.cost.fusion import Fused
from launcher.plan.partition.sizes import Sizes
from launcher.plan.values.setting import Setting

KEY = "parallel.loss_repeated_mean"


def repeats(job: Job, sizes: Sizes, cut: bool) -> int:
    """How often the loss counts: ranks of ``tp`` repeat it, unless its classes are ``cut`` among them."""
    return 1 if job.parallel.loss_repeated_mean or cut else sizes.grid["tp"]


def rows(job: Job, sizes: Sizes, fused: Fused | None) -> Iterator[Setting]:
    """Yields the setting if it is ``false``: then the ranks that repeat a loss add it up, without a mean."""
    if job.parallel.loss_repeated_mean:
        return
    ranks = sizes.grid["tp"]
    cut = fused is not None and fused.loss_cut
    if repeats(job, sizes, cut) > 1:
        why = f"the loss that {ranks} tensor-parallel ranks repeat counts {ranks} times"
        yield Setting(KEY, "false", "applied", f"{why}: gradients are {ranks} times as large")
    elif ranks > 1:
        why = f"{ranks} tensor-parallel ranks work out one loss together, none repeats it"
        yield Setting(KEY, "false", "satisfied", why)
    else:
        yield Setting(KEY, "false", "satisfied", "no rank repeats the loss of another")
