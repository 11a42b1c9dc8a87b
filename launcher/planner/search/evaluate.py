"""Predicts the seconds and bytes of one layout from its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan import recompute_auto
from launcher.plan.cost.device_memory import tightest
from launcher.plan.plan import Plan
from launcher.plan.prediction.prediction import predict
from launcher.plan.prediction.speeds import Speeds
from launcher.plan.prediction.step_work import StepWork
from launcher.plan.values.text import GB
from launcher.planner.plan_job import plan_job, plan_like
from launcher.planner.search.bounds import CLOSE, NEAR, Bound, Policies
from launcher.planner.search.layout import Candidates, Layout, Trace, job_of
from launcher.planner.traces import Traces


@dataclass(frozen=True)
class Refused:
    """A layout that cannot be planned."""

    layout: Layout
    why: str


@dataclass(frozen=True)
class Predicted:
    """What plans predict for a layout.

    ``nbytes``: bytes on the ``ranks`` that need most. ``count``: samples or tokens per step. ``terms``: the
    parts of ``seconds``.

    ``again``: the share of the blocks that is recomputed so that the layout fits, if the plan decides that,
    and ``policy`` how. ``between``: seconds and bytes are interpolated between plans that recompute no block
    and all blocks. ``pipeline``: seconds until the last action ends, and ``plain``: bytes, both without
    recomputation. ``tried``: policies, each with the bytes and the additional seconds if all blocks are
    recomputed. ``works``: the work of those plans, if layouts will be measured.
    """

    layout: Layout
    seconds: float
    nbytes: int
    ranks: tuple[int, ...]
    mfu: float
    count: int
    unit: str
    pipeline: float
    plain: int
    terms: tuple[tuple[str, float], ...]
    again: float = 0.0
    policy: str = ""
    between: bool = False
    tried: tuple[tuple[str, int, float], ...] = ()
    works: tuple[StepWork, ...] = field(default=(), compare=False, repr=False)

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts by seconds, then by bytes; of equal layouts the simplest comes first."""
        return (self.seconds, self.nbytes, self.layout.order)

    def on(self, speeds: Speeds) -> float:
        """The seconds of the same plans on other devices."""
        none, *every = (predict(work, speeds).seconds for work in self.works)
        return none + self.again * (every[0] - none) if every else none


@dataclass(frozen=True)
class Question:
    """What all layouts of a search share."""

    job: Job
    named: Candidates
    speeds: Speeds

    @property
    def room(self) -> int | None:
        gb = self.job.cluster.memory_gb
        return None if gb is None else int(gb * GB)

    def of(self, layout: Layout) -> Job:
        """The request for this layout."""
        fuses = "parallel.comm_fusion" in self.job.search.over
        return job_of(self.job, layout, self.named, self.speeds if fuses else None)


@dataclass(frozen=True)
class Slower:
    """A layout that is too slow with any recomputation; ``pipeline`` and ``plain`` as in ``Predicted``."""

    layout: Layout
    pipeline: float
    plain: int


@dataclass(frozen=True)
class Trial:
    """A layout to plan.

    ``least``: its lower bound, or ``None`` if that does not matter. ``likely``: effects of policies in
    similar layouts; ``surely``: their best effects. Planning stops early for a layout that would take
    ``below`` seconds or more.
    """

    layout: Layout
    least: Bound | None = None
    likely: Policies = field(default_factory=dict)
    surely: Policies = field(default_factory=dict)
    below: float = inf

    @property
    def trace(self) -> Trace:
        return self.layout.cut, self.layout.micro, self.layout.stages == 1

    def again(self, plain: Predicted, policies: Policies) -> dict[str, float]:
        """Seconds that each policy spends on recomputation so that the layout fits."""
        if self.least is None:
            return {}
        uneven = self.least.uneven(plain.pipeline, plain.plain)
        shares = self.least.again(uneven, policies)
        return {p: share * uneven.seconds * self.least.forward for p, share in shares.items()}

    def slow(self, plain: Predicted) -> bool:
        """Whether the layout is too slow under every policy."""
        again = min(self.again(plain, self.surely).values(), default=0.0)
        return NEAR * (plain.seconds + again) >= self.below < inf

    def policies(self, plain: Predicted) -> tuple[str, ...]:
        """The policies that may be best for it."""
        takes = self.again(plain, self.likely)
        few = min(takes.values(), default=inf)
        return tuple(p for p in recompute_auto.POLICIES[1:] if takes.get(p, few) <= CLOSE * few)


def evaluate(asked: Question, trial: Trial, traces: Traces) -> Predicted | Refused | Slower:
    """Predicts a layout from its plan.

    If as few blocks as fit are recomputed, it interpolates between plans that recompute no block and all
    blocks.
    """
    found = _evaluated(asked, trial, traces)
    if not isinstance(found, Predicted) or asked.job.search.measure:
        return found
    return replace(found, works=())


def _evaluated(asked: Question, trial: Trial, traces: Traces) -> Predicted | Refused | Slower:
    layout = trial.layout
    job = asked.of(layout)
    choosing = recompute_auto.asked(job)
    try:
        plain = plan_job(recompute_auto.under(job, {}) if choosing else job, traces)
        if plain.estimate.step is None:
            return Refused(layout, "over device matrices no seconds are predicted")
        found = predicted(layout, plain)
        if not choosing or asked.room is None or found.nbytes <= asked.room:
            return found
        if trial.slow(found):
            return Slower(layout, found.pipeline, found.plain)
        return _fitted(found, job, plain, asked.room, policies=trial.policies(found), traces=traces)
    except RequestError as error:
        return Refused(layout, "; ".join(f"{p.key}: {p.text}" for p in error.problems[:1]))


def predicted(layout: Layout, plan: Plan) -> Predicted:
    """Reads the prediction from the layout's plan, which has seconds."""
    step = plan.estimate.step
    assert step is not None
    most = tightest(plan.estimate.memory, 0)
    count, unit = (step.samples, "samples") if step.tokens is None else (step.tokens, "tokens")
    return Predicted(
        layout=layout,
        seconds=step.seconds,
        nbytes=most.needed,
        ranks=most.ranks,
        mfu=step.mfu,
        count=count,
        unit=unit,
        pipeline=step.timeline.makespan,
        plain=most.needed,
        terms=tuple((t.name, t.seconds) for t in step.terms),
        works=(plan.estimate.work,),
    )


def _fitted(
    plain: Predicted, job: Job, plan: Plan, room: int, *, policies: tuple[str, ...], traces: Traces
) -> Predicted:
    """The fastest prediction that fits in ``room``; the one with fewest bytes if none fits."""
    tried: list[Predicted] = []
    same = recompute_auto.stage_of_modules(plan)
    others = tuple(p for p in recompute_auto.POLICIES[1:] if p not in policies)
    again = recompute_auto.POLICIES[1:] if job.parallel.pipeline.stages > 1 else ()
    for some, like in ((policies, same), (others, same), (again, None)):
        if not any(one.nbytes <= room for one in tried):
            tried += _all_again(plain, job, plan, some, like, traces)
    shown = tuple((one.policy, one.nbytes, one.seconds - plain.seconds) for one in tried)
    tried = [replace(one, tried=shown) for one in tried]
    fitting = [_between(plain, all_again, room) for all_again in tried if all_again.nbytes <= room]
    if fitting:
        return min(fitting, key=lambda one: one.order)
    return min([plain, *tried], key=lambda one: one.nbytes)


def _all_again(
    plain: Predicted,
    job: Job,
    plan: Plan,
    policies: Sequence[str],
    like: dict[str, int] | None,
    traces: Traces,
) -> Iterator[Predicted]:
    """Predictions with all blocks recomputed; modules keep the stages of ``like``."""
    blocks = recompute_auto.blocks(plan)
    for policy in policies if blocks else ():
        try:
            made = plan_like(recompute_auto.under(job, dict.fromkeys(blocks, policy)), like, traces)
        except RequestError:  # this policy does not suit the model; another one may
            continue
        found = replace(predicted(plain.layout, made), policy=policy, again=1.0)
        yield replace(found, pipeline=plain.pipeline, plain=plain.plain)


def _between(none: Predicted, every: Predicted, room: int) -> Predicted:
    """Interpolates the share of recomputed blocks at which the layout needs exactly ``room`` bytes."""
    share = (none.nbytes - room) / (none.nbytes - every.nbytes)
    seconds = none.seconds + share * (every.seconds - none.seconds)
    both = zip(none.terms, every.terms, strict=True)
    terms = tuple((name, took + share * (more - took)) for (name, took), (_, more) in both)
    mfu = none.mfu * none.seconds / seconds
    works = (*none.works, *every.works)
    mixed = replace(every, seconds=seconds, mfu=mfu, nbytes=room, between=True)
    return replace(mixed, again=share, terms=terms, works=works)


def fits(found: Predicted, room: int | None) -> bool:
    return room is None or found.nbytes <= room


def best(found: Sequence[Predicted], room: int | None) -> list[Predicted]:
    """The predictions that fit, fastest first."""
    return sorted((p for p in found if fits(p, room)), key=lambda p: p.order)
