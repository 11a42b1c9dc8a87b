"""The speeds of a rank on the cluster of a request."""

from __future__ import annotations

from dataclasses import replace

from launcher.job.schema.job import Job
from launcher.plan.sharding.search.cost import CostModel


def on_cluster(costs: CostModel, job: Job, ranks: int) -> CostModel:
    """``costs`` with speeds of ``job.cluster``, where they are told, for stages of so many ``ranks``.

    A precision that is not listed is as slow as the slowest.
    """
    cluster = job.cluster
    if cluster.links is None:
        return costs
    assert cluster.tflops is not None
    assert cluster.efficiency is not None
    assert cluster.devices_per_node is not None
    assert cluster.memory_gb_per_s is not None
    peak = cluster.tflops.get(job.train.precision, min(cluster.tflops.values()))
    links = cluster.links
    inside = ranks <= cluster.devices_per_node
    link, rate = (links.inside if inside else links.between), links.inside.gb_per_s
    if not inside:
        rate = min(rate, links.between.gb_per_s * cluster.devices_per_node)
    return replace(
        costs,
        flops_per_second=peak * 1e12 * cluster.efficiency,
        memory_bytes_per_second=cluster.memory_gb_per_s * 1e9,
        latency=(ranks - 1) * link.latency_us / 1e6,
        bytes_per_second=rate * 1e9,
    )
