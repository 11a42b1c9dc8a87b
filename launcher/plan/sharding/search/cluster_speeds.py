"""The speeds of a rank on the cluster of a request."""

from __future__ import annotations

from dataclasses import replace

from launcher.job.schema.job import Job
from launcher.plan.prediction.speeds import speeds
from launcher.plan.sharding.search.cost import CostModel


def on_cluster(costs: CostModel, job: Job, ranks: int) -> CostModel:
    """Returns ``costs`` with the speeds of ``job.cluster``, if known, for stages of ``ranks`` ranks."""
    fast = speeds(job)
    if fast is None:
        return costs
    latency, rate = fast.ring(range(ranks))
    return replace(
        costs,
        flops_per_second=fast.peak * fast.efficiency,
        memory_bytes_per_second=fast.memory,
        latency=latency,
        bytes_per_second=rate,
    )
