"""The plan's layouts as a strategy, as they are written beside a run before anything trains."""

from __future__ import annotations

from launcher.checkpoint.strategy import Entry, Strategy
from launcher.plan.plan import Plan


def of_plan(plan: Plan) -> Strategy:
    """Every parameter and persistent buffer."""
    entries = {
        p.name: Entry(p.layout, p.spec.dtype, "buffer" if p.buffer else "param", p.names[1:]) for p in plan.params
    }
    return Strategy(plan.sizes.grid, entries)
