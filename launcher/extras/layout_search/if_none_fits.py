"""Finds the single change of a request with which the smallest layout needs the fewest bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launcher.extras.layout_search import candidates
from launcher.job.schema.job import Job
from launcher.job.schema.search import AUTO

LEFT_OPEN = (
    candidates.RECOMPUTE,
    candidates.HSDP,
    candidates.STAGES,
    candidates.MICROS,
    candidates.TP,
)


@dataclass(frozen=True)
class RequestChange:
    """A change: the ``words`` to type, and the changed request."""

    words: str
    job: Job


def changes(job: Job) -> Iterator[RequestChange]:
    """Leaves one more setting open, or doubles the nodes; no change affects what is trained."""
    over = job.search.over
    for key in LEFT_OPEN:
        if any(k == key or k.startswith(f"{key}.") for k in over):
            continue
        if key == candidates.TP and not (job.parallel.operators or over.get(candidates.OPERATORS)):
            continue  # no operator is sharded over it
        search = job.search.model_copy(update={"over": {**over, key: AUTO}})
        yield RequestChange(f"{key}={AUTO}", job.model_copy(update={"search": search}))
    nodes = 2 * job.launch.nnodes
    launch = job.launch.model_copy(update={"nnodes": nodes})
    yield RequestChange(f"launch.nnodes={nodes}", job.model_copy(update={"launch": launch}))


def best_change(job: Job, leanest: Callable[[Job], int | None]) -> tuple[RequestChange, int] | None:
    """Returns the change whose smallest layout needs the fewest bytes; the first of equal ones."""
    sized_changes = [
        (nbytes, n, change) for n, change in enumerate(changes(job)) if (nbytes := leanest(change.job))
    ]
    if not sized_changes:
        return None
    nbytes, _, change = min(sized_changes, key=lambda one: one[:2])
    return change, nbytes
