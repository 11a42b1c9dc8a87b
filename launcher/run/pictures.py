"""The files of a run folder that draw its plan: in seconds where the plan predicts them."""

from __future__ import annotations

from launcher.plan.cost import memory_curve, memory_svg
from launcher.plan.plan import Plan
from launcher.plan.schedule.timeline import chrome, svg

PIPELINE = ("kernels", "collectives over tp", "pipeline bubble")
"""What the seconds of a step go to while its schedule runs; the rest comes after it."""


def pictures(plan: Plan) -> dict[str, str]:
    """Their texts by name; memory over device matrices is not known from action to action."""
    found, step, timeline = plan.estimate, plan.estimate.step, plan.estimate.simulated
    after, lanes = None, () if step is None else step.lanes
    if step is not None:
        after = tuple((t.name, t.seconds) for t in step.terms if t.name not in PIPELINE and t.seconds)
    out = {
        "timeline.svg": svg(timeline, after, lanes),
        "timeline.json": chrome(timeline, after=after, lanes=lanes),
    }

    if plan.sharding is None:
        curves = memory_curve.curves(
            found.loads,
            found.memory,
            plan.sizes.grid,
            timeline=None if after is None else timeline,
            after=sum(n for _, n in after or ()),
        )
        out["memory.svg"] = memory_svg.svg(curves, found.room, seconds=after is not None)
    return out
