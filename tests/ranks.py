"""Real ranks for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.runtime.cluster.world import World
from launcher.runtime.processes.fork_server import start_here
from launcher.runtime.processes.start_and_restart import run_ranks
from launcher.steps.model.shared_construction import SharedMetaModels

T = TypeVar("T")
DRAWN = SharedMetaModels()


def on_ranks(size: int, work: Callable[..., T], *args: Any, timeout_s: float = 120, **options: Any) -> list[T]:
    """Run ``work(world, *args)`` on ``size`` forked gloo ranks; return results in rank order.

    ``options`` are those of ``run_ranks``. Ranks are forked from this process, not from a clean one, because the work
    is a closure and tests patch what it calls. If a job is followed by its plan in ``args``, its model is built before,
    for the first build of each rank (``DRAWN``).
    """

    def call(world: World) -> T:
        return work(world, *args)

    for job, plan in _jobs(args):
        DRAWN.add(job, plan)
    try:
        return here(call, size, timeout_s=timeout_s, **options)
    finally:
        DRAWN.clear()


def here(work: Callable[[World], T], size: int, **options: Any) -> list[T]:
    """Call ``run_ranks`` with ranks that are forked from this process."""
    return run_ranks(work, size, start=start_here, **options)


def _jobs(args: Any) -> Iterator[tuple[Job, Plan]]:
    """Yield the jobs that ranks are to build, with their plans."""
    for one, following in zip(args, (*args[1:], None), strict=False):
        if isinstance(one, Job) and isinstance(following, Plan):
            yield one, following
        elif isinstance(one, tuple | list):
            yield from _jobs(one)
        elif isinstance(one, Mapping):
            yield from _jobs(tuple(one.values()))
