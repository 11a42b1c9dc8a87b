"""``parallel.gradients_mean``: the mean of the gradients over data-parallel ranks, or their sum."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.schema.job import Job
from launcher.plan.partition.sizes import Sizes
from launcher.plan.values.setting import Setting

KEY = "parallel.gradients_mean"


def rows(job: Job, sizes: Sizes) -> Iterator[Setting]:
    """Yields the setting if gradients are summed."""
    if job.parallel.gradients_mean:
        return
    if sizes.replicas > 1:
        why = f"gradients are summed over the {sizes.replicas} data-parallel ranks"
        yield Setting(KEY, "false", "applied", why)
    else:
        yield Setting(KEY, "false", "satisfied", "one data-parallel rank")
