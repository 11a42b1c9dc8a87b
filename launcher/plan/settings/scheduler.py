"""The order of one step; for ``auto`` the one that is shortest when simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.job.schema.job import Job
from launcher.plan.partition.sizes import Note, Sizes
from launcher.plan.schedule import schedules
from launcher.plan.schedule.actions import Schedule
from launcher.plan.schedule.simulate import Cost, Timeline, simulate
from launcher.plan.settings import legal

KEY = "parallel.pipeline.scheduler"

TRANSFER = 0.05
"""Share of a mean forward that a transfer takes when schedules are compared.

At no cost at all, two schedules that differ in how they hide transfers look alike.
"""
CLOSE = 0.03
"""Steps that differ by less are equally short: the costs are estimates."""


@dataclass(frozen=True)
class Chosen:
    """``sizes`` are those asked for, with the placement of the ``scheduler``."""

    scheduler: str
    sizes: Sizes
    schedule: Schedule
    timeline: Timeline
    notes: tuple[Note, ...]

    @property
    def late(self) -> bool:
        """Whether weight gradients come after the backward that sends those of the inputs on."""
        return any(a.kind == "W" for row in self.schedule for a in row)


def choose(job: Job, sizes: Sizes, cost: Cost) -> Chosen:
    """The scheduler asked for; for ``auto`` one of those that are legal, and a note of the comparison.

    Of steps as short as the shortest, to within ``CLOSE``, the one that holds the fewest activations wins.
    """
    pipe = job.parallel.pipeline
    if pipe.scheduler != "auto":
        return _chosen(pipe.scheduler, sizes, cost, less_memory=pipe.less_memory and pipe.stages > 1)
    real = replace(cost, transfer=TRANSFER * sum(cost.forward) / len(cost.forward))
    ran = {name: _chosen(name, sizes, real).timeline for name in legal.candidates(job, sizes)}
    order = sorted(ran, key=lambda n: ran[n].makespan)
    short = [n for n in order if ran[n].makespan <= ran[order[0]].makespan * (1 + CLOSE)]
    best = min(short, key=lambda n: max(ran[n].peak))
    text = f"auto -> {best}: bubble {ran[best].bubble:.1%} simulated"
    if others := [f"{n} {ran[n].bubble:.1%}" for n in order if n != best]:
        text += f"; {', '.join(others)}"
    return _chosen(best, sizes, cost, (Note(KEY, text),))


def _chosen(name: str, sizes: Sizes, cost: Cost, notes: tuple[Note, ...] = (), *, less_memory: bool = False) -> Chosen:
    ranks = sizes.grid["pp"]
    sizes = replace(sizes, v=schedules.RULES[name].v and ranks > 1)
    schedule = schedules.build(name, ranks, sizes.chunks, sizes.micros, less_memory, sizes.pieces)
    return Chosen(name, sizes, schedule, simulate(schedule, sizes.places, cost), notes)
