"""``parallel.pipeline``: which scheduler supports which other settings, and the one that ``auto`` chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import Pipeline
from launcher.plan.resolve import compile, hsdp
from launcher.plan.schedule import schedules
from launcher.plan.schedule.schedules import RULES, Rule, Schedule
from launcher.plan.schedule.simulate import Cost, Timeline, simulate
from launcher.plan.sizes import Sizes
from launcher.plan.values.note import Note
from launcher.plan.values.setting import Setting

KEY = "parallel.pipeline"
MICROS, SCHEDULER, PIECES = f"{KEY}.micro_batch_num", f"{KEY}.scheduler", f"{KEY}.seq_chunks"
INTERLEAVE, LESS_MEMORY = f"{KEY}.interleave", f"{KEY}.less_memory"


def micros(job: Job, notes: list[Note], problems: list[Problem]) -> int:
    """Returns the number of micro batches.

    If too few are requested, it adds a problem to ``problems`` and returns enough for planning to continue.
    """
    pipe = job.parallel.pipeline
    requested, stages = pipe.micro_batch_num, pipe.stages
    least, why = stages, "as many as stages"
    rule = RULES.get(pipe.scheduler)
    if rule is not None and rule.v and stages > 1 and rule.full:
        least, why = 2 * stages, f"as many as virtual stages, which {pipe.scheduler} needs"

    if requested is None:
        notes.append(Note(MICROS, f"null -> {least}: {why}"))
    elif requested < stages == least:
        text = f"{requested}: too few to fill {stages} stages; at least as many are needed"
        problems.append(Problem(MICROS, text, f"{MICROS}={least}"))
    elif requested < least:
        text = f"{requested}: too few; {pipe.scheduler} needs at least as many as virtual stages, {least}"
        problems.append(Problem(MICROS, text, f"{MICROS}={least}"))
    return max(requested or 0, least)


def problems(job: Job, sizes: Sizes | None) -> list[Problem]:
    """Returns every reason why the requested scheduler cannot run this job."""
    pipe = job.parallel.pipeline
    if pipe.stages == 1:
        return list(_one_stage(pipe))
    problems = list(_less_memory(pipe))
    if pipe.scheduler != "auto":
        problems += _illegal(job, sizes, RULES[pipe.scheduler])
    return problems


def _one_stage(pipe: Pipeline) -> Iterator[Problem]:
    if pipe.seq_chunks > 1:
        text = f"{pipe.seq_chunks}: pieces of a sequence fill the bubble between stages"
        text += ", but there is only one stage"
        yield Problem(PIECES, text, f"{PIECES}=1")


def _less_memory(pipe: Pipeline) -> Iterator[Problem]:
    if pipe.less_memory and pipe.scheduler != "1f1b":
        text = f"true: only interleaved 1f1b supports it; the scheduler is {pipe.scheduler}"
        yield Problem(LESS_MEMORY, text, f"{LESS_MEMORY}=false")
    elif pipe.less_memory and not (pipe.interleave and pipe.chunks > 1):
        text = "true: has no effect without several virtual stages per rank"
        yield Problem(LESS_MEMORY, text, _several(pipe))


def _several(pipe: Pipeline) -> str:
    """Returns the overrides that give a rank several virtual stages."""
    return f"{INTERLEAVE}=true {KEY}.chunks={max(pipe.chunks, 2)}"


def _illegal(job: Job, sizes: Sizes | None, rule: Rule) -> Iterator[Problem]:
    """Yields problems for settings that the scheduler of ``rule`` does not support."""
    pipe = job.parallel.pipeline
    if rule.single and pipe.interleave:
        yield Problem(INTERLEAVE, f"true: {pipe.scheduler} has one stage per rank", f"{INTERLEAVE}=false")
    if rule.v and pipe.interleave and pipe.chunks != 2:
        text = f"{pipe.chunks}: {pipe.scheduler} has exactly two virtual stages per rank"
        yield Problem(f"{KEY}.chunks", text, f"{KEY}.chunks=2")
    yield from _pieces(pipe, rule)
    yield from hsdp.dropped(job, sizes, rule)
    yield from compile.split(job, rule)


def _pieces(pipe: Pipeline, rule: Rule) -> Iterator[Problem]:
    """Yields problems with sequence chunks.

    These are MindSpore's conditions for its sequence pipelines; other schedulers do not cut sequences.
    """
    ranks, pieces = pipe.stages, pipe.seq_chunks
    if pieces > 1 and not rule.seq:
        text = f"{pieces}: the scheduler {pipe.scheduler} does not support sequence chunks"
        yield Problem(PIECES, text, f"{SCHEDULER}=seqpipe")

    # the virtual stages that the scheduler needs, and the number of pieces that it accepts
    if rule.several and not (pipe.interleave and pipe.chunks > 1):
        text = f"{pipe.scheduler}: needs several virtual stages per rank"
        yield Problem(SCHEDULER, text, _several(pipe))
    if rule.several and pieces > ranks:
        text = f"{pieces}: {pipe.scheduler} takes at most as many pieces as there are stages, {ranks}"
        yield Problem(PIECES, text, f"{PIECES}={ranks}")

    if pipe.scheduler == "seqsmartvpp" and ranks % 2:
        text = f"seqsmartvpp: needs an even number of stages, not {ranks}"
        yield Problem(SCHEDULER, text, f"{SCHEDULER}=seqvpp")


def candidates(job: Job, sizes: Sizes) -> tuple[str, ...]:
    """Returns the schedulers that ``auto`` may choose.

    They support ``job`` and its virtual stages per rank.
    """
    if job.parallel.pipeline.stages == 1:
        return ("1f1b",)
    return tuple(name for name, rule in RULES.items() if _suits(job, sizes, name, rule))


def _suits(job: Job, sizes: Sizes, scheduler: str, rule: Rule) -> bool:
    """Returns true if this scheduler can run ``job`` with its stages, micro batches and sequence chunks."""
    pipe = job.parallel.pipeline.model_copy(update={"scheduler": scheduler})
    candidate = job.model_copy(update={"parallel": job.parallel.model_copy(update={"pipeline": pipe})})
    if rule.v and sizes.chunks != 2:
        return False
    if rule.single and sizes.chunks != 1:
        return False
    if rule.full and sizes.micros < sizes.virtual:
        return False
    return rule.seq == (pipe.seq_chunks > 1) and not any(_illegal(candidate, sizes, rule))


TRANSFER = 0.05
"""The duration of a transfer, as a fraction of a mean forward, when schedules are compared.

If transfers cost nothing, schedules that differ only in how they hide transfers would look equal.
"""
CLOSE = 0.03
"""Steps whose lengths differ by less than this share count as equal, because the costs are estimates."""


@dataclass(frozen=True)
class ScheduleChoice:
    """A scheduler, its schedule and the simulated timeline.

    ``sizes`` are the requested ones, with the placement of stages that the ``scheduler`` uses.
    """

    scheduler: str
    sizes: Sizes
    schedule: Schedule
    timeline: Timeline
    notes: tuple[Note, ...] = ()

    @property
    def late(self) -> bool:
        """True if weight gradients are computed after the backward that sends the input gradients on."""
        return any(a.kind == "W" for row in self.schedule for a in row)


def choose(job: Job, sizes: Sizes, cost: Cost) -> ScheduleChoice:
    """Returns the requested scheduler; for ``auto``, the best candidate and a note with the comparison.

    Among the candidates whose step is at most ``CLOSE`` longer than the shortest one, the candidate with the
    lowest peak of activations wins.
    """
    pipe = job.parallel.pipeline
    if pipe.scheduler != "auto":
        return _run(pipe.scheduler, sizes, cost, less_memory=pipe.less_memory and pipe.stages > 1)

    real = replace(cost, transfer=TRANSFER * sum(cost.forward) / len(cost.forward))
    ran = {name: _run(name, sizes, real).timeline for name in candidates(job, sizes)}
    order = sorted(ran, key=lambda name: ran[name].makespan)
    short = [name for name in order if ran[name].makespan <= ran[order[0]].makespan * (1 + CLOSE)]
    best = min(short, key=lambda name: max(ran[name].peak))

    text = f"auto -> {best}: bubble {ran[best].bubble:.1%} simulated"
    others = [f"{name} {ran[name].bubble:.1%}" for name in order if name != best]
    if others:
        text += f"; {', '.join(others)}"
    return replace(_run(best, sizes, cost), notes=(Note(SCHEDULER, text),))


def _run(scheduler: str, sizes: Sizes, cost: Cost, *, less_memory: bool = False) -> ScheduleChoice:
    """Builds and simulates the schedule of ``scheduler``."""
    ranks = sizes.grid["pp"]
    sizes = replace(sizes, v=RULES[scheduler].v and ranks > 1)
    schedule = schedules.build(
        scheduler, ranks, sizes.chunks, sizes.micros, less_memory=less_memory, pieces=sizes.pieces
    )
    return ScheduleChoice(scheduler, sizes, schedule, simulate(schedule, sizes.places, cost))


def rows(job: Job, sizes: Sizes) -> Iterator[Setting]:
    """Yields the pipeline settings that are applied, or that have no effect here, with the reason."""
    pipe = job.parallel.pipeline
    if pipe.stages == 1 and pipe.scheduler not in ("1f1b", "gpipe", "auto"):
        why = "one stage has no bubble to fill, so it runs as 1f1b"
        yield Setting(SCHEDULER, pipe.scheduler, "satisfied", why)
    if pipe.interleave:
        why = f"{sizes.chunks} virtual stages per rank"
        yield _interleaved(INTERLEAVE, pipe, sizes, why)
    if pipe.less_memory:
        why = "a rank runs ahead by one forward and waits for each transfer"
        yield _interleaved(LESS_MEMORY, pipe, sizes, why)
    if pipe.output_broadcast:
        yield _output_broadcast(pipe)
    if pipe.loss_reduction == "sum":
        yield _summed_loss(sizes)


def _interleaved(key: str, pipe: Pipeline, sizes: Sizes, why: str) -> Setting:
    """Returns the row of a setting that has an effect only with several virtual stages per rank."""
    if sizes.chunks > 1:
        return Setting(key, "true", "applied", why)
    alone = "one stage has no bubble to shrink" if pipe.stages == 1 else "each rank has one chunk"
    return Setting(key, "true", "satisfied", alone)


def _output_broadcast(pipe: Pipeline) -> Setting:
    key = f"{KEY}.output_broadcast"
    if pipe.stages == 1:
        return Setting(key, "true", "satisfied", "there is only one stage")
    why = "evaluation broadcasts the output of the last stage to every stage, once per batch"
    return Setting(key, "true", "applied", why)


def _summed_loss(sizes: Sizes) -> Setting:
    key = f"{KEY}.loss_reduction"
    if sizes.micros == 1:
        return Setting(key, "sum", "satisfied", "there is only one micro batch")
    return Setting(key, "sum", "applied", f"loss and gradients are summed over {sizes.micros} micro batches")
