"""Out of memory on a rank, as one message: what there was, what was planned, which setting makes room."""

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
from launcher.plan.capacity import LighterLayout, lighter
from launcher.plan.cost.device_memory import KEY as MEMORY
from launcher.plan.cost.memory import Memory
from launcher.plan.plan import Plan
from launcher.plan.values.text import GB, bytes_text
from launcher.planner.plan_job import plan_job
from launcher.runtime import free_memory
from launcher.runtime.cluster.world import World
from launcher.runtime.device import JOINED, is_accelerator, memory_in_use
from launcher.runtime.faults import OutOfMemory

PATIENCE_S = 30.0
"""No lighter layout is planned any more after it: the other ranks wait for this message."""
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ASKED = re.compile(r"[Tt]r(?:ied|ying) to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_ON_CPU = "DefaultCPUAllocator: can't allocate memory"
_PARTS = ("params", "grads", "optimizer", "gathered", "activations")


@dataclass(frozen=True)
class InUse:
    """Bytes of one device when it had no more; of the CPU those of the machine.

    ``tensors`` of this rank held at most so many, ``kept``: the allocator had more, ``asked``: what was
    wanted besides. ``total`` is 0 where nobody says.
    """

    device: str
    total: int
    free: int
    tensors: int
    kept: int
    asked: int

    @property
    def others(self) -> int:
        """What other processes have, and what a device's runtime takes for itself."""
        return max(0, self.total - self.free - self.tensors - self.kept)

    @property
    def room(self) -> int:
        """What this rank's tensors could have at most."""
        return self.tensors + self.kept + self.free

    @property
    def missing(self) -> int:
        """What tensors would have to take less for the request that failed to fit."""
        return max(1, self.tensors + self.asked - self.room)

    def __str__(self) -> str:
        """
        >>> print(InUse("npu:1", 80 << 30, 1 << 30, 70 << 30, 4 << 30, 2 << 30))
        of 80.0 GB its tensors held 70.0 GB, its allocator kept 4.0 GB, others held 5.0 GB; 1.0 GB were free
        """
        if not self.total:
            return f"its process had taken {bytes_text(self.tensors)}; {bytes_text(self.free)} were free"
        held = f"of {bytes_text(self.total)} its tensors held {bytes_text(self.tensors)}"
        more = f"its allocator kept {bytes_text(self.kept)}, others held {bytes_text(self.others)}"
        return f"{held}, {more}; {bytes_text(self.free)} were free"


@contextmanager
def explained(
    world: World,
    job: Job,
    plan: Plan | None,
    trial: bool = False,
    has_optimizer_state: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """What the block raises for want of memory becomes one message; any other error passes through.

    ``plan``: of what the block trains; ``None`` where that is something else. ``trial``: nobody looks for a
    lighter layout, for others are tried anyway. ``has_optimizer_state``: whether an update has been made, or
    loaded: before it less is held than is planned for the fullest moment.
    """
    try:
        yield
    except Exception as error:
        cause = _cause(error)
        if cause is None:
            raise
        at = in_use(world.device, str(cause))
        lines = _message(at, world.rank, job, plan, trial, has_optimizer_state())
        if isinstance(error, RunError):  # it says whose code it was
            lines.append(str(error))
        raise OutOfMemory("\n  ".join(lines)) from error


def _cause(error: BaseException) -> BaseException | None:
    """The allocator's error that ``error`` is or was raised from: torch's pipeline wraps a stage's errors."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, torch.OutOfMemoryError) or _ON_CPU in str(link):
            return link
        link = link.__cause__
    return None


def in_use(device: str, message: str) -> InUse:
    """What the device has and who holds it; ``message`` is the allocator's, which says what was asked for."""
    found = _ASKED.search(message)
    asked = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if not is_accelerator(device):
        there = free_memory.ram()
        own = getrusage(RUSAGE_SELF).ru_maxrss << 10
        return InUse(device, 0, there.ram if there else 0, own, 0, asked)
    total, free, tensors, kept = memory_in_use(torch.device(device))
    return InUse(device, total, free, tensors, kept, asked)


def _message(
    at: InUse, rank: int, job: Job, plan: Plan | None, trial: bool, has_optimizer_state: bool
) -> list[str]:
    wanted = f", {bytes_text(at.asked)} more were asked for" if at.asked else ""
    lines = [f"out of memory on {at.device}{wanted}: {at}"]
    if plan is None:
        return lines
    planned = plan.estimate.memory[rank]
    lines.append(f"planned: {parts(planned)}")

    # what makes room
    if trial:
        return lines
    excess = overhead(at, planned, has_optimizer_state)
    if (found := cure(at, rank, job, plan, excess)) is not None:
        lines.append(f"try: {found.words} ({_planned(found.planned, excess)})")
    elif max(at.tensors, at.asked) > 2 * planned.total:
        lines.append(
            "most of it is not in the plan: it belongs to code of your own, or to the process itself"
        )
    else:
        lines.append(
            "no lighter layout of these ranks makes room: take more ranks or a smaller train.batch_size"
        )
    joined = JOINED.get(at.device.partition(":")[0])
    if joined is not None and at.asked and at.kept > at.asked:
        lines.append(f"its allocator kept more than that, in pieces: {joined} joins them")
    return lines


def parts(planned: Memory) -> str:
    """All that is planned, and of what it is made, the largest first.

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
    'planned: 40.0 MB; this run took 1.25 times its plan, which makes it 50.0 MB'
    """
    text = f"planned: {bytes_text(nbytes)}"
    if excess < 1.005:
        return text
    likely = bytes_text(round(nbytes * excess))
    return f"{text}; this run took {excess:.2f} times its plan, which makes it {likely}"


def overhead(at: InUse, planned: Memory, has_optimizer_state: bool) -> float:
    """How many times its plan this rank takes of its device, as this run has shown; at least 1.

    Its tensors took, with what was asked for, more than is planned by then; and its allocator takes more from
    the device than tensors hold. Of the CPU nothing is known: the bytes are those of the whole process there.

    >>> from launcher.plan.cost.memory import Memory
    >>> plan = Memory(0, 10 << 30, grads=0, optimizer=20 << 30, gathered=0, activations=40 << 30)
    >>> at = InUse("npu:1", 80 << 30, 0, tensors=59 << 30, kept=0, asked=1 << 30)
    >>> overhead(at, plan, has_optimizer_state=False), overhead(at, plan, has_optimizer_state=True)
    (1.2, 1.0)
    """
    if not at.total:
        return 1.0
    by_then = planned.total - (0 if has_optimizer_state else planned.optimizer)
    beyond = max(1.0, (at.tensors + at.asked) / max(1, by_then))
    return beyond * (at.tensors + at.kept) / max(1, at.tensors)


@dataclass(frozen=True)
class Cure:
    """What to add to the command, and the bytes that are planned then for the same rank."""

    words: str
    planned: int


def cure(at: InUse, rank: int, job: Job, plan: Plan, excess: float = 1.0) -> Cure | None:
    """The first layout with the same numbers that is planned to take enough less.

    There is room for ``excess`` times its plan, and it saves what was missing: what ran out of memory may
    be far from the fullest moment.
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
        except RequestError:  # not for this model, or beside what else was asked for
            continue
        if planned[rank].total <= target and _most(planned) <= _most(before):
            return Cure(words, planned[rank].total)
    return None


def _most(memory: Sequence[Memory]) -> int:
    return max(row.total for row in memory)


def _changes(job: Job, plan: Plan, target: int) -> Iterator[tuple[str, Job]]:
    """Requests that train the same numbers in less memory, and the words that make each."""
    room = math.floor(target / GB * 1000) / 1000
    if job.parallel.recompute is None and room > 0:
        again = LighterLayout("parallel.recompute=auto", {"recompute": Recompute(modules=AUTO)})
        cluster = job.cluster.model_copy(update={"memory_gb": room})
        yield f"{again.words} {MEMORY}={room:g}", again.of(job).model_copy(update={"cluster": cluster})
    for change in lighter(job, plan):
        yield change.words, change.of(job)
