"""``debug.profiler``: steps and ranks that do not exist."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.sizes import Sizes
from launcher.plan.values.text import many

KEY = "debug.profiler"


def problems(job: Job, sizes: Sizes | None) -> Iterator[Problem]:
    """Yields problems of a window that never opens or never closes, and of ranks that are not in the plan."""
    window = job.debug.profiler
    if window is None or sizes is None:
        return
    if window.steps is not None:
        yield from _steps(*window.steps, sizes.steps)
    size = sizes.grid.size
    absent = [rank for rank in window.ranks or () if rank >= size]
    if window.ranks is not None and absent:
        existing = ",".join(str(rank) for rank in window.ranks if rank < size) or "0"
        text = f"{absent[0]}: the plan has {many(size, 'rank')}, counted from 0"
        yield Problem(f"{KEY}.ranks", text, f"{KEY}.ranks=[{existing}]")


def _steps(first: int, last: int, total: int) -> Iterator[Problem]:
    """Yields the problem of a window from ``first`` to ``last``; ``total``: optimizer steps of a training."""
    key = f"{KEY}.steps"
    if first > last:
        text = f"[{first}, {last}]: the first step of the window comes after its last"
        yield Problem(key, text, f"{key}=[{min(last, total)},{min(first, total)}]")
    elif last > total:
        shifted = max(1, total - (last - first))
        text = f"[{first}, {last}]: the training ends after {many(total, 'step')}"
        yield Problem(key, text, f"{key}=[{shifted},{total}]")
