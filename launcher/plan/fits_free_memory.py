"""Checks whether the ranks of a plan fit the free memory of their machine and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.memory.optimizer_state import StateSize
from launcher.plan.plan import Plan
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.text import bytes_text, spans

KEY = "launch.check_memory"
PROCESS = 32 << 20
"""Bytes that a rank uses before it has a model. A forked rank has 29 to 38 MB that it does not share."""

HEAP = 2.2
"""The largest measured ratio of a process's memory to the bytes of its tensors.

The C library keeps memory that is freed in small pieces.
"""


@dataclass(frozen=True)
class Free:
    """The bytes that are free now: ``ram`` of the host, ``devices`` of each device by local rank.

    ``where`` names the owner of ``ram``; ``kind`` is the type of the devices.
    """

    ram: int
    where: str = "this machine"
    devices: tuple[int, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class Fit:
    """The tightest memory of a machine: ``ranks`` share it and need ``needed`` of its ``free`` bytes."""

    needed: int
    free: int
    where: str
    ranks: tuple[int, ...]

    @property
    def fits(self) -> bool:
        return self.needed <= self.free

    def __str__(self) -> str:
        """
        >>> print(Fit(3 << 30, 4 << 30, "this machine", (0, 1)))
        fits: 3.0 of 4.0 GB free on this machine
        >>> print(Fit(5 << 40, 4 << 30, "npu:1", (1,)))
        does not fit: rank 1 needs 5.0 TB, 4.0 GB are free on npu:1
        """
        needed, free = bytes_text(self.needed), bytes_text(self.free)
        if not self.fits:
            return f"does not fit: {self._who} {needed}, {free} are free on {self.where}"
        if needed.split()[1] == free.split()[1]:
            needed = needed.split()[0]
        return f"fits: {needed} of {free} free on {self.where}"

    @property
    def _who(self) -> str:
        return f"rank {self.ranks[0]} needs" if len(self.ranks) == 1 else f"ranks {spans(self.ranks)} need"


def fit(job: Job, plan: Plan, ranks: Sequence[int], free: Free, besides: Mapping[int, int]) -> Fit | None:
    """Returns how the ``ranks`` of one machine fit, or ``None`` if no step builds the planned model there.

    ``besides``: bytes of the machine's memory that each rank uses for things outside the plan.
    """
    kinds = {job.steps[name].kind for phase in plan.phases if phase.where == "ranks" for name in phase.steps}
    if not kinds - {"certify"} or not ranks:
        return None
    rank_bytes = {rank: _peak_bytes(plan, rank, trains="train" in kinds) for rank in ranks}
    if free.devices:
        devices = enumerate(zip(ranks, free.devices, strict=False))
        each = [Fit(rank_bytes[rank], nbytes, f"{free.kind}:{i}", (rank,)) for i, (rank, nbytes) in devices]
        return max(each, key=lambda at: at.needed / max(at.free, 1))
    needed = sum(rank_bytes[rank] + besides.get(rank, 0) + PROCESS for rank in ranks)
    return Fit(needed, free.ram, free.where, tuple(ranks))


def _peak_bytes(plan: Plan, rank: int, trains: bool) -> int:
    """Returns the peak bytes of ``rank``: of a step, or of a constructor that must build the full model."""
    at = plan.estimate.memory[rank]
    made = 0 if plan.deferred else sum(prod(p.spec.shape) * ITEMSIZE[p.spec.dtype] for p in plan.params)
    return max(at.total if trains else at.params, at.params + made)


def least(job: Job, plan: Plan, ranks: Sequence[int]) -> int:
    """Returns the bytes that ``ranks`` need together at least, in any layout.

    These are one copy of the weights and of what training keeps for them, and a process for each rank.
    """
    weights = [(prod(p.spec.shape) * ITEMSIZE[p.spec.dtype], p.trainable) for p in plan.params]
    size = StateSize.from_job(job, plan.observed.optimizer)
    grads = sum(n for n, trainable in weights if trainable)
    state = grads + sum(size.nbytes(p, p.spec.shape) for p in plan.params)
    trains = any(job.steps[name].kind == "train" for phase in plan.phases for name in phase.steps)
    return sum(n for n, _ in weights) + trains * state + len(ranks) * PROCESS


def problems(shortage: Fit, cure: str) -> Problem:
    """Returns the problem of a layout that does not fit; ``cure`` is a layout that does."""
    return Problem(KEY, f"{shortage}; {KEY}=false starts it anyway", cure)
