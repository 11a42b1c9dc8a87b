"""Reports out of memory on a rank in one message: what was in use, what was planned, what makes room."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage

import torch

from launcher.errors import RequestError, RunError
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import AUTO, Recompute
from launcher.plan.lighter_layouts import LighterLayout, lighter
from launcher.plan.memory.fits_cluster import KEY as MEMORY
from launcher.plan.memory.rank_memory import Memory
from launcher.plan.plan import Plan
from launcher.plan.values.text import GB, bytes_text
from launcher.planner.plan_job import plan_job
from launcher.runtime import free_memory
from launcher.runtime.cluster.world import World
from launcher.runtime.device import JOINED, is_accelerator, memory_in_use
from launcher.runtime.faults import OutOfMemory

PATIENCE_S = 30.0
"""The time after which no further layout is planned: the other ranks wait for the message."""
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REQUESTED = re.compile(r"[Tt]r(?:ied|ying) to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_ON_CPU = "DefaultCPUAllocator: can't allocate memory"
_PARTS = ("params", "grads", "optimizer", "gathered", "activations")


@dataclass(frozen=True)
class InUse:
    """Bytes of one device when it ran out of memory; for the CPU those of the machine.

    ``tensors``: the peak of this rank's tensors; ``kept``: what the allocator had reserved beyond them;
    ``requested``: the size of the allocation that failed. ``total`` is 0 if unknown.
    """

    device: str
    total: int
    free: int
    tensors: int
    kept: int
    requested: int

    @property
    def others(self) -> int:
        """Bytes of other processes and of the device's runtime."""
        return max(0, self.total - self.free - self.tensors - self.kept)

    @property
    def room(self) -> int:
        """The most bytes that this rank's tensors could use."""
        return self.tensors + self.kept + self.free

    @property
    def missing(self) -> int:
        """Bytes that tensors would have to save for the failed request to fit."""
        return max(1, self.tensors + self.requested - self.room)

    def __str__(self) -> str:
        """
        >>> print(InUse("npu:1", 80 << 30, 1 << 30, 70 << 30, 4 << 30, 2 << 30))
        of 80.0 GB its tensors used 70.0 GB, its allocator kept 4.0 GB, others used 5.0 GB; 1.0 GB was free
        """
        if not self.total:
            return f"its process used {bytes_text(self.tensors)}; {bytes_text(self.free)} was free"
        used = f"of {bytes_text(self.total)} its tensors used {bytes_text(self.tensors)}"
        more = f"its allocator kept {bytes_text(self.kept)}, others used {bytes_text(self.others)}"
        return f"{used}, {more}; {bytes_text(self.free)} was free"


@contextmanager
def explained(
    world: World,
    job: Job,
    plan: Plan | None,
    trial: bool = False,
    has_optimizer_state: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Turns out-of-memory errors of the block into one message; other errors pass through.

    ``plan``: the plan of what the block trains; ``None`` if it trains something else. ``trial``: suggests no
    lighter layout, as the caller tries others anyway. ``has_optimizer_state``: whether an update was made or
    loaded; before that less memory is in use than is planned for the peak.
    """
    try:
        yield
    except Exception as error:
        cause = _cause(error)
        if cause is None:
            raise
        at = in_use(world.device, str(cause))
        lines = _message(at, world.rank, job, plan, trial, has_optimizer_state())
        if isinstance(error, RunError):  # its text names the code that failed
            lines.append(str(error))
        raise OutOfMemory("\n  ".join(lines)) from error


def _cause(error: BaseException) -> BaseException | None:
    """Returns the allocator's error in the chain of ``error``, as torch's pipeline wraps errors of stages."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, torch.OutOfMemoryError) or _ON_CPU in str(link):
            return link
        link = link.__cause__
    return None


def in_use(device: str, message: str) -> InUse:
    """Returns the memory of a device and its use.

    ``message``: the allocator's error, with the requested size.
    """
    match = _REQUESTED.search(message)
    requested = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not is_accelerator(device):
        there = free_memory.ram()
        own = getrusage(RUSAGE_SELF).ru_maxrss << 10
        return InUse(device, 0, there.ram if there else 0, own, 0, requested)
    total, free, tensors, kept = memory_in_use(torch.device(device))
    return InUse(device, total, free, tensors, kept, requested)


def _message(
    at: InUse, rank: int, job: Job, plan: Plan | None, trial: bool, has_optimizer_state: bool
) -> list[str]:
    request = f", an allocation of {bytes_text(at.requested)} failed" if at.requested else ""
    lines = [f"out of memory on {at.device}{request}: {at}"]
    if plan is None:
        return lines
    planned = plan.estimate.memory[rank]
    lines.append(f"planned: {parts(planned)}")

    # find a change that makes room
    if trial:
        return lines
    excess = overhead(at, planned, has_optimizer_state)
    if (change := cure(at, rank, job, plan, excess)) is not None:
        lines.append(f"try: {change.words} ({_planned(change.planned, excess)})")
    elif max(at.tensors, at.requested) > 2 * planned.total:
        lines.append("most of this memory is not in the plan: your own code uses it, or the process itself")
    else:
        lines.append(
            "found no layout on these ranks that saves enough memory: "
            "use more ranks or a smaller train.batch_size"
        )
    joined = JOINED.get(at.device.partition(":")[0])
    if joined is not None and at.requested and at.kept > at.requested:
        lines.append(f"its allocator kept more free memory than that, in pieces: {joined} joins them")
    return lines


def parts(planned: Memory) -> str:
    """Returns the planned total and its parts, the largest first.

    >>> print(parts(Memory(0, 4 << 30, 2 << 30, 8 << 30, gathered=0, activations=9 << 30)))
    23.0 GB (activations 9.0 GB, optimizer 8.0 GB, params 4.0 GB, grads 2.0 GB)
    """
    sizes = sorted(((getattr(planned, name), name) for name in _PARTS), reverse=True)
    each = ", ".join(f"{name} {bytes_text(n)}" for n, name in sizes if n)
    return f"{bytes_text(planned.total)} ({each})"


def _planned(nbytes: int, excess: float) -> str:
    """
    >>> _planned(40 << 20, 1.0)
    'planned: 40.0 MB'
    >>> _planned(40 << 20, 1.25)
    'planned: 40.0 MB; this run used 1.25 times its plan, so expect 50.0 MB'
    """
    text = f"planned: {bytes_text(nbytes)}"
    if excess < 1.005:
        return text
    likely = bytes_text(round(nbytes * excess))
    return f"{text}; this run used {excess:.2f} times its plan, so expect {likely}"


def overhead(at: InUse, planned: Memory, has_optimizer_state: bool) -> float:
    """Returns the ratio of the memory that this rank used to the memory that was planned for it; at least 1.

    It is the product of two ratios: the tensors and the failed request to what was planned for that time, at
    least 1; and the memory that the allocator took from the device to the tensors in it. On the CPU the
    result is 1, as only the bytes of the process are known.

    >>> from launcher.plan.memory.rank_memory import Memory
    >>> plan = Memory(0, 10 << 30, grads=0, optimizer=20 << 30, gathered=0, activations=40 << 30)
    >>> at = InUse("npu:1", 80 << 30, 0, tensors=59 << 30, kept=0, requested=1 << 30)
    >>> overhead(at, plan, has_optimizer_state=False), overhead(at, plan, has_optimizer_state=True)
    (1.2, 1.0)
    """
    if not at.total:
        return 1.0
    by_then = planned.total - (0 if has_optimizer_state else planned.optimizer)
    beyond = max(1.0, (at.tensors + at.requested) / max(1, by_then))
    return beyond * (at.tensors + at.kept) / max(1, at.tensors)


@dataclass(frozen=True)
class Cure:
    """What to add to the command, and the bytes that are then planned for the same rank."""

    words: str
    planned: int


def cure(at: InUse, rank: int, job: Job, plan: Plan, excess: float = 1.0) -> Cure | None:
    """Returns the first change to an equivalent layout whose plan saves enough memory, or ``None``.

    ``excess`` times its plan must fit, and it must save at least the missing bytes: the failed request may be
    far from the planned peak. No rank may need more than the largest rank is planned to need now.
    """
    began = time.monotonic()
    before = plan.estimate.memory
    target = min(before[rank].total - at.missing, math.floor(at.room / excess))
    if target <= 0:
        return None
    for words, other in _changes(job, plan, target):
        if time.monotonic() - began > PATIENCE_S:
            return None
        try:
            planned = plan_job(other).estimate.memory
        except RequestError:  # not valid for this model or with other settings
            continue
        if planned[rank].total <= target and _most(planned) <= _most(before):
            return Cure(words, planned[rank].total)
    return None


def _most(memory: Sequence[Memory]) -> int:
    return max(row.total for row in memory)


def _changes(job: Job, plan: Plan, target: int) -> Iterator[tuple[str, Job]]:
    """Yields changes that give the same results in less memory: the settings to add, and the changed job."""
    room = math.floor(target / GB * 1000) / 1000
    if job.parallel.recompute is None and room > 0:
        lean = LighterLayout("parallel.recompute=auto", {"recompute": Recompute(modules=AUTO)})
        cluster = job.cluster.model_copy(update={"memory_gb": room})
        yield f"{lean.words} {MEMORY}={room:g}", lean.applied_to(job).model_copy(update={"cluster": cluster})
    for change in lighter(job, plan):
        yield change.words, change.applied_to(job)
