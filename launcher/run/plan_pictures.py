"""Draws a plan as files in the run folder. Times are in seconds if the plan predicts them."""

from __future__ import annotations

from launcher.plan.cut import debug_graphs
from launcher.plan.memory import memory_curves
from launcher.plan.plan import Plan
from launcher.plan.show import graphs_svg, memory_svg
from launcher.plan.show.timeline import chrome
from launcher.plan.show.timeline_svg import svg

PIPELINE = ("kernels", "collectives over tp", "pipeline bubble")
"""The terms of a step's time that fall into its schedule; all other terms follow the schedule."""


def pictures(plan: Plan) -> dict[str, str]:
    """Returns the files' texts by name.

    Device matrices get no memory.svg: their memory per action is unknown.
    """
    estimate, step, timeline = plan.estimate, plan.estimate.step, plan.estimate.simulated
    after, lanes = None, () if step is None else step.lanes
    if step is not None:
        after = tuple((t.name, t.seconds) for t in step.terms if t.name not in PIPELINE and t.seconds)
    out = {
        "timeline.svg": svg(timeline, after, lanes),
        "timeline.json": chrome(timeline, after=after, lanes=lanes),
    }

    if plan.sharding is None:
        curves = memory_curves.curves(
            estimate.loads,
            estimate.memory,
            plan.sizes.grid,
            timeline=None if after is None else timeline,
            after=sum(n for _, n in after or ()),
        )
        out["memory.svg"] = memory_svg.svg(curves, estimate.room, seconds=after is not None)
    return out | _graphs(plan)


def _graphs(plan: Plan) -> dict[str, str]:
    """Returns the calls of each stage as a text and as a picture, if they are requested."""
    if plan.graph is None:
        return {}
    model = debug_graphs.Staged(plan.stages, plan.boundaries, plan.params, uncut=plan.leaves is None)
    out = {}
    for index, pp in enumerate(plan.sizes.places):
        one = debug_graphs.stage_graph(model, plan.graph, index, tuple(plan.sizes.grid.ranks(pp=pp)))
        out[f"graphs/stage{index}.txt"] = debug_graphs.text(one)
        out[f"graphs/stage{index}.svg"] = graphs_svg.svg(one)
    return out
