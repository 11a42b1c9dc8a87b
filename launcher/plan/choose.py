"""Which scheduler ``auto`` stands for: the one with the shortest simulated step."""

from __future__ import annotations

from dataclasses import replace

from launcher.job.schema import Job
from launcher.plan import legal, schedules
from launcher.plan.simulate import Cost, Timeline, simulate
from launcher.plan.sizes import Note, Sizes

KEY = "parallel.pipeline.scheduler"

TRANSFER = 0.05
"""Share of a mean forward that a transfer takes when schedules are compared.

At no cost at all, two schedules that differ in how they hide transfers look alike.
"""
CLOSE = 0.03
"""Steps that differ by less are equally short: the costs are estimates."""


def choose(job: Job, sizes: Sizes, cost: Cost) -> tuple[str, Sizes, list[Note]]:
    """The scheduler, the sizes with its placement, and for ``auto`` a note of the comparison.

    Of steps as short as the shortest, to within ``CLOSE``, the one that holds the fewest activations wins.
    """
    asked = job.parallel.pipeline.scheduler
    if asked != "auto":
        return asked, sizes, []
    real = replace(cost, transfer=TRANSFER * sum(cost.forward) / len(cost.forward))
    ran = {name: _run(name, sizes, real) for name in legal.candidates(job, sizes)}
    order = sorted(ran, key=lambda n: ran[n].makespan)
    short = [n for n in order if ran[n].makespan <= ran[order[0]].makespan * (1 + CLOSE)]
    best = min(short, key=lambda n: max(ran[n].peak))
    text = f"auto -> {best}: bubble {ran[best].bubble:.1%} simulated"
    if others := [f"{n} {ran[n].bubble:.1%}" for n in order if n != best]:
        text += f"; {', '.join(others)}"
    return best, _placed(best, sizes), [Note(KEY, text)]


def _run(name: str, sizes: Sizes, cost: Cost) -> Timeline:
    sizes = _placed(name, sizes)
    return simulate(schedules.build(name, sizes.grid["pp"], sizes.chunks, sizes.micros), sizes.places, cost)


def _placed(name: str, sizes: Sizes) -> Sizes:
    return replace(sizes, v=schedules.RULES[name].v and sizes.grid["pp"] > 1)
