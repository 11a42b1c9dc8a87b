"""What ``model.lora`` trains, and adapters that no forward would use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.plan.partition.params import Placed
from launcher.plan.partition.sizes import Note
from launcher.plan.values.facts import Graph
from launcher.plan.values.text import many, some

KEY = "model.lora"


def problems(job: Job, params: Sequence[Placed], graph: Graph) -> Iterator[Problem]:
    """Yields a problem for linear modules with adapters that the forward never calls.

    Other code may use their weights, but it does not use the adapters.
    """
    never = {name for name, scope in graph.scopes if scope is None}
    idle = [p.name.rpartition(".")[0] for p in params if p.role == "adapter" and never.intersection(p.names)]
    if job.model.lora is not None and idle:
        names = some([*dict.fromkeys(idle)])
        text = (
            f"{names}: the forward never calls it, so an adapter would have no effect; "
            "remove it from the list"
        )
        yield Problem(f"{KEY}.modules", text)


def notes(job: Job, params: Sequence[Placed]) -> Iterator[Note]:
    """Yields a note on how much ``model.lora`` trains."""
    if job.model.lora is None:
        return
    adapters = [p for p in params if p.role == "adapter"]
    numbers = sum(prod(p.spec.shape) for p in adapters)
    whole = sum(prod(p.spec.shape) for p in params if not p.buffer)
    what = f"{many(len(adapters) // 2, 'adapter')} of rank {job.model.lora.rank}"
    text = f"{what}: {numbers} of {whole} numbers are trained, all others are frozen"
    if kept_half := [p for p in params if p.half]:
        size = sum(prod(p.spec.shape) for p in kept_half)
        text += f"; {size} of them are kept in {kept_half[0].spec.dtype}, as they come"
    yield Note(KEY, text)
