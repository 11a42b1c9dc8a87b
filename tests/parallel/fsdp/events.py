"""What a rank did in one step, in order: calls of modules, and when collectives of FSDP2 began or were waited for."""

from __future__ import annotations

import re

from torch.profiler import ProfilerActivity, profile

from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.runtime.cluster.world import World
from tests.parity import build, step

SAID = {
    "all_gather": "gather", "all_gather_copy_out": "wait", "pre_forward": "forward", "post_forward": "done",
    "pre_backward": "backward", "post_backward_reduce": "reduce", "scatter": "reduce",
}  # fmt: skip
EVENT = re.compile(r"(?:FSDP::)?(\w+)(?: \((.*)\))?$")


def rank_events(world: World, j: Job, plan: Plan) -> list[str]:
    """The events of a second step, such as "gather layers.0": a group's modules, or "root" for the rest."""
    par, pipe = build(world, j, plan)
    for _ in range(2):
        for _, p in par.trainable():
            p.grad = None
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            step(j, par, pipe)
    events = sorted(seen.events() or [], key=lambda e: e.time_range.start)
    found = [(e, EVENT.match(e.name)) for e in events]
    return [f"{SAID[m[1]]} {m[2] or 'root'}" for _, m in found if m is not None and m[1] in SAID]
