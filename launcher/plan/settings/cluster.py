"""``cluster``: whether its nodes have enough devices for the requested ranks."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job


def room(job: Job) -> int | None:
    """The memory of a rank's device in bytes; ``None`` if the request does not say it."""
    gb = job.cluster.memory_gb
    return None if gb is None else int(gb * (1 << 30))


def accelerators(job: Job) -> bool:
    """Whether the plan is for ranks on accelerators, wherever it is made."""
    if job.launch.device == "auto":
        return job.cluster.links is not None and job.cluster.cores_per_node is None
    return job.launch.device != "cpu"


def refused(job: Job) -> Iterator[Problem]:
    """Yields a problem if a node has more ranks than devices."""
    cluster, launch = job.cluster, job.launch
    each = cluster.devices_per_node if cluster.cores_per_node is None else None  # cores may be shared
    if each is None or launch.nproc is None or launch.nproc <= each:
        return
    nodes, rest = divmod(launch.nproc * launch.nnodes, each)
    cure = "" if rest else f"launch.nproc={each} launch.nnodes={nodes}"
    text = f"{launch.nproc}: a node of {cluster.name or 'the cluster'} has {each} devices"
    yield Problem("launch.nproc", text, cure)
