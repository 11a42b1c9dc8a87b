"""Decides which blocks are recomputed in a layout that may be the best, by planning it as it would run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan import recompute_auto
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.planner.search.evaluate import Predicted, Question, Refused, fits, predicted
from launcher.planner.search.layout import Trace
from launcher.planner.traces import Traces


@dataclass(frozen=True)
class Choice:
    """A layout that may be the best, whose recomputed blocks are still undecided."""

    found: Predicted

    @property
    def trace(self) -> Trace:
        layout = self.found.layout
        return layout.cut, layout.micro, layout.stages == 1


@dataclass(frozen=True)
class Finalist:
    """``job``: the request with all settings decided; ``predicted``: the prediction of its plan."""

    job: Job
    predicted: Predicted


def settle(asked: Question, choice: Choice, traces: Traces) -> Finalist | Refused:
    """Lets a plan choose the recomputed blocks; if it finds no choice, recomputes all of them."""
    found, job = choice.found, asked.of(choice.found.layout)
    if not recompute_auto.asked(job):
        return Finalist(job, found)
    if not found.again:
        return Finalist(recompute_auto.under(job, {}), found)
    try:
        return _settled(found, job, plan_job(job, traces))
    except RequestError:
        every = _all_again(found, job, traces)
    if every is not None and fits(every.predicted, asked.room):
        return every
    return Refused(found.layout, f"{found.policy}: slightly too large with any recomputation")


def _all_again(found: Predicted, job: Job, traces: Traces) -> Finalist | None:
    """Recomputes all blocks, in stages that are balanced for that; ``None`` if it cannot be planned."""
    try:
        blocks = recompute_auto.blocks(plan_job(recompute_auto.under(job, {}), traces))
        every = recompute_auto.under(job, dict.fromkeys(blocks, found.policy))
        return _settled(found, every, plan_job(every, traces))
    except RequestError:
        return None


def _settled(found: Predicted, job: Job, plan: Plan) -> Finalist:
    blocks, policies = recompute_auto.blocks(plan), {r.policy for r in plan.recomputed}
    share = len(plan.recomputed) / max(len(blocks), 1)
    exact = predicted(found.layout, plan)
    return Finalist(job, replace(exact, again=share, policy=" and ".join(sorted(policies))))
