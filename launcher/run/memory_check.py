"""Checks before a start whether the ranks on this machine fit into its memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from launcher.checkpoint.layout.derive_strategy import strategy_of_plan
from launcher.checkpoint.write import saved_boxes
from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import AUTO, Recompute
from launcher.plan import recompute_auto
from launcher.plan.fits_free_memory import HEAP, KEY, Fit, Free, fit, least, problems
from launcher.plan.lighter_layouts import LighterLayout, lighter
from launcher.plan.memory.fits_cluster import KEY as ROOM
from launcher.plan.memory.fits_cluster import tightest
from launcher.plan.memory.optimizer_state import StateSize
from launcher.plan.plan import Plan
from launcher.plan.resolve import recompute
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.text import GB
from launcher.planner.plan_job import plan_job
from launcher.run.launch import Start, mode, outer_size
from launcher.runtime import free_memory
from launcher.runtime.cluster.launch_env import place


def checked(job: Job, plan: Plan, start: Start) -> Start:
    """Returns ``start`` with notes on memory.

    Raises ``RequestError`` if memory does not suffice.
    """
    if job.launch.check_memory:
        refuse(_roomy(job, plan))
    ranks = local_ranks(job, plan)
    free = free_memory.available_memory(len(ranks), start.device) if ranks else None
    memory_fit = None if free is None else _fit(job, plan, ranks, free)
    if free is None or memory_fit is None:
        return start
    if not memory_fit.fits and job.launch.check_memory:
        raise RequestError((problems(memory_fit, _cure(job, plan, ranks, free)),))
    note = str(memory_fit) if memory_fit.fits else f"{KEY}=false: {memory_fit}"
    if memory_fit.fits and start.device == "cpu" and memory_fit.needed * HEAP > memory_fit.free:
        note += f"; it may take {HEAP:g} times that, because the C library keeps freed memory"
    return replace(start, notes=(*start.notes, note))


def with_device_memory(job: Job) -> Job:
    """Sets the devices' memory if a plan must fit it and the request does not state it."""
    if not recompute_auto.memory_not_stated(job) or job.launch.device == "cpu":
        return job
    from launcher.runtime import device as devices

    kind = devices.accelerator()
    free = free_memory.available_memory(1, kind) if kind is not None and devices.count(kind) else None
    if free is None or not free.devices:
        return job
    cluster = job.cluster.model_copy(update={"memory_gb": free.devices[0] / GB})
    return job.model_copy(update={"cluster": cluster})


def _roomy(job: Job, plan: Plan) -> list[Problem]:
    """Returns problems of a plan that exceeds the stated memory, with a cure that fits."""
    room = plan.estimate.room
    trains = any(job.steps[name].kind == "train" for phase in plan.phases for name in phase.steps)
    tightest_room = None if room is None else tightest(plan.estimate.memory, room)
    if tightest_room is None or tightest_room.fits or not trains:
        return []
    text = f"{tightest_room.value_and_verdict}; {KEY}=false starts it anyway"
    auto = LighterLayout(f"{recompute.KEY}=auto", {"recompute": Recompute(modules=AUTO)})
    for change in (auto, *lighter(job, plan)):
        try:
            other = plan_job(change.applied_to(job))
        except RequestError:  # not valid for this model or with other settings
            continue
        if tightest(other.estimate.memory, tightest_room.room).fits:
            return [Problem(ROOM, text, change.words)]
    return [Problem(ROOM, text)]


def shortage(job: Job, plan: Plan) -> str | None:
    """Returns why a plan that is only shown would be refused here, though another machine may be intended.

    A plan for a cluster is checked only against the memory of the cluster.
    """
    if job.cluster.name is not None or plan.estimate.room is not None:
        return None
    if not job.launch.check_memory or job.launch.device not in ("cpu", "auto"):
        return None
    ranks = local_ranks(job, plan)
    free = free_memory.ram() if ranks else None
    if free is None:
        return None
    memory_fit = _fit(job, plan, ranks, free)
    return None if memory_fit is None or memory_fit.fits else str(memory_fit)


def local_ranks(job: Job, plan: Plan) -> tuple[int, ...]:
    """Returns the ranks that a start from here runs on this machine, in the order of their devices."""
    size = plan.sizes.grid.size
    if mode(job, outer_size()) != "external":
        return tuple(range(size)) if job.launch.nnodes == 1 else ()
    at = place()
    if at is None or at.size != size:
        return ()
    first = at.rank - at.local_rank
    return tuple(rank for rank in range(first, first + at.local_size) if 0 <= rank < size)


def _fit(job: Job, plan: Plan, ranks: tuple[int, ...], free: Free) -> Fit | None:
    copied: dict[int, int] = {}
    if job.checkpoint.asynchronous and job.checkpoint.every is not None:
        copied = {rank: _copied(job, plan, rank) for rank in ranks}
    return fit(job, plan, ranks, free, besides=copied)


def _copied(job: Job, plan: Plan, rank: int) -> int:
    """Returns the bytes of the copy that ``checkpoint.async`` writes from: weights and optimizer states."""
    layout, state = strategy_of_plan(plan), StateSize.from_job(job, plan.observed.optimizer)
    placed = {p.name: p for p in plan.params}
    total = 0
    for boxes in saved_boxes(layout, rank).values():
        for name, box in boxes.items():
            total += prod(box.shape) * ITEMSIZE[layout.entries[name].dtype]
            total += state.nbytes(placed[name], box.shape)
    return total


def _cure(job: Job, plan: Plan, ranks: tuple[int, ...], free: Free) -> str:
    """Returns the first lighter layout that fits, if there is one."""
    if least(job, plan, ranks) > (sum(free.devices) or free.ram):
        return ""
    for change in lighter(job, plan):
        other = change.applied_to(job)
        try:
            memory_fit = _fit(other, plan_job(other), ranks, free)
        except RequestError:  # not valid for this model or with other settings
            continue
        if memory_fit is not None and memory_fit.fits:
            return change.words
    return ""
