"""Shows a request: its plan or its timeline, and what is known of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.errors import refuse
from launcher.job.schema.job import Job
from launcher.plan.plan import impossible
from launcher.plan.schedule.timeline import text as drawn
from launcher.plan.show import SHORT, short, text
from launcher.plan.step_order import alone
from launcher.planner.plan_job import before_torch, plan_job, planning, settled
from launcher.run import memory_check, own_tokens, preflight, resume
from launcher.run.search import layout_search
from launcher.run.settle import Chosen, open_ended


def shown(job: Job, overrides: Sequence[str] = ()) -> Iterator[str]:
    """The plan or its timeline, and what each transform of an existing checkpoint will read."""
    with own_tokens.supposed(job) as (supposed, pending):
        yield from _shown(supposed, overrides, pending)


def _shown(job: Job, overrides: Sequence[str], pending: Sequence[str]) -> Iterator[str]:
    """The lines of ``shown``; ``pending``: notes on tokens that do not exist yet."""
    job = memory_check.told(job)
    chosen = layout_search.settled(job) if open_ended(job) else Chosen(job)
    job = chosen.job
    transforms = preflight.previews(job)
    if not (transforms and alone(job.steps)):
        plan = plan_job(job)
        with planning():
            since = resume.shown(job, plan, overrides)
            notes = [*preflight.pending(job, plan), *pending]
        plan = replace(plan, notes=(*plan.notes, *chosen.notes, *since))

        if job.show == "timeline":
            yield drawn(plan.estimate.timeline)
        else:
            lacking = memory_check.shortage(job, plan)
            notes += [lacking] if lacking else []
            yield text(plan) if job.show == "plan-full" else short(plan, SHORT - len(notes))
            yield from notes
    if job.show != "timeline":
        yield from transforms


def check(job: Job) -> None:
    """Raises ``RequestError`` if it could not be shown, as far as that is known without torch."""
    with own_tokens.supposed(job) as (supposed, _):
        if open_ended(supposed) or job.show == "search":
            layout_search.check(supposed)
        elif not (preflight.previews(supposed) and alone(job.steps)):
            refuse(impossible(before_torch(settled(memory_check.told(supposed))).asked))
