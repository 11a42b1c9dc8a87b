"""Checks whether ranks fit in the memory of their devices and on the nodes of the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.memory.rank_memory import Memory
from launcher.plan.values.text import bytes_text, spans

KEY = "cluster.memory_gb"


@dataclass(frozen=True)
class Room:
    """The memory of the fullest ``ranks``: each needs ``needed`` bytes of ``room``."""

    needed: int
    room: int
    ranks: tuple[int, ...]

    @property
    def value_and_verdict(self) -> str:
        """
        >>> print(Room(5 << 30, 4 << 30, (3,)).value_and_verdict)
        4: does not fit: rank 3 needs 5.0 GB of 4.0 GB
        """
        return f"{self.room / (1 << 30):g}: {self}"

    @property
    def fits(self) -> bool:
        return self.needed <= self.room

    def __str__(self) -> str:
        """
        >>> print(Room(3 << 30, 4 << 30, (0, 1)))
        fits: 3.0 of 4.0 GB on ranks 0-1
        >>> print(Room(5 << 30, 4 << 30, (3,)))
        does not fit: rank 3 needs 5.0 GB of 4.0 GB
        """
        needed, room = bytes_text(self.needed), bytes_text(self.room)
        alone = len(self.ranks) == 1
        who = f"rank{'' if alone else 's'} {spans(self.ranks)}"
        if not self.fits:
            need = "needs" if alone else "need"
            return f"does not fit: {who} {need} {needed} of {room}"
        if needed.split()[1] == room.split()[1]:
            needed = needed.split()[0]
        return f"fits: {needed} of {room} on {who}"


def tightest(memory: Sequence[Memory], room: int) -> Room:
    """Returns the room on the ranks that need most memory."""
    most = max(m.total for m in memory)
    return Room(most, room, tuple(m.rank for m in memory if m.total == most))


def room(job: Job) -> int | None:
    """Returns the memory of a rank's device in bytes; ``None`` if the request does not state it."""
    gb = job.cluster.memory_gb
    return None if gb is None else int(gb * (1 << 30))


def accelerators(job: Job) -> bool:
    """Returns true if the plan is for ranks on accelerators, wherever it is made."""
    if job.launch.device == "auto":
        return job.cluster.links is not None and job.cluster.cores_per_node is None
    return job.launch.device != "cpu"


def problems(job: Job) -> Iterator[Problem]:
    """Yields a problem if a node has more ranks than devices."""
    cluster, launch = job.cluster, job.launch
    each = cluster.devices_per_node if cluster.cores_per_node is None else None  # cores may be shared
    if each is None or launch.nproc is None or launch.nproc <= each:
        return
    nodes, rest = divmod(launch.nproc * launch.nnodes, each)
    cure = "" if rest else f"launch.nproc={each} launch.nnodes={nodes}"
    text = f"{launch.nproc}: a node of {cluster.name or 'the cluster'} has {each} devices"
    yield Problem("launch.nproc", text, cure)
