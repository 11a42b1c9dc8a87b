"""``cluster``: whether the ranks of the request have devices there."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job


def room(job: Job) -> int | None:
    """Bytes of a rank's device; ``None`` where nobody says them."""
    gb = job.cluster.memory_gb
    return None if gb is None else int(gb * (1 << 30))


def accelerators(job: Job) -> bool:
    """Whether ranks are planned on devices of their own, wherever the plan is made."""
    if job.launch.device == "auto":
        return job.cluster.links is not None and job.cluster.cores_per_node is None
    return job.launch.device != "cpu"


def refused(job: Job) -> Iterator[Problem]:
    """More ranks a node than it has devices."""
    cluster, launch = job.cluster, job.launch
    each = cluster.devices_per_node if cluster.cores_per_node is None else None  # cores may be shared
    if each is None or launch.nproc is None or launch.nproc <= each:
        return
    nodes, rest = divmod(launch.nproc * launch.nnodes, each)
    cure = "" if rest else f"launch.nproc={each} launch.nnodes={nodes}"
    text = f"{launch.nproc}: a node of {cluster.name or 'the cluster'} has {each} devices"
    yield Problem("launch.nproc", text, cure)
