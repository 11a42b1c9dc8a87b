"""The plan's layouts as a strategy, as they are written beside a run before anything trains."""

from __future__ import annotations

from launcher.checkpoint.layout.strategy import Entry, Strategy
from launcher.plan.plan import Plan


def of_plan(plan: Plan, only_trainable: bool = False) -> Strategy:
    """Every parameter and persistent buffer, or the parameters that are trained."""
    entries = {
        p.name: Entry(p.layout, p.spec.dtype, "buffer" if p.buffer else "param", p.names[1:])
        for p in plan.params
        if p.trainable or not only_trainable
    }
    return Strategy(plan.sizes.grid, entries)
