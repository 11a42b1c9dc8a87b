"""Predicts one layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from launcher.errors import RequestError
from launcher.extras.layout_search import bounds
from launcher.extras.layout_search.bounds import CLOSE, NEAR, Bound, ModelCost, Policies
from launcher.extras.layout_search.candidates import Candidates, LayoutCandidate, TraceKey, job_of
from launcher.job.schema.job import Job
from launcher.plan import recompute_auto
from launcher.plan.memory.fits_cluster import tightest
from launcher.plan.plan import Plan
from launcher.plan.time.prediction import predict
from launcher.plan.time.speeds import Speeds
from launcher.plan.time.step_work import StepWork
from launcher.plan.values.text import GB
from launcher.planner.plan_job import plan_job, plan_like
from launcher.planner.trace_model import Traces, keeps_messages


@dataclass(frozen=True)
class Unplannable:
    """A layout that cannot be planned."""

    layout: LayoutCandidate
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

    layout: LayoutCandidate
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
        """Returns the seconds of the same plans on other devices."""
        none, *every = (predict(work, speeds).seconds for work in self.works)
        return none + self.again * (every[0] - none) if every else none


@dataclass(frozen=True)
class SearchContext:
    """What all layouts of a search share."""

    job: Job
    named: Candidates
    speeds: Speeds

    @property
    def room(self) -> int | None:
        gb = self.job.cluster.memory_gb
        return None if gb is None else int(gb * GB)

    def job_of(self, layout: LayoutCandidate) -> Job:
        """Returns the request for this layout."""
        fuses = "parallel.comm_fusion" in self.job.search.over
        return job_of(self.job, layout, self.named, self.speeds if fuses else None)


@dataclass(frozen=True)
class Slower:
    """A layout that is too slow with any recomputation; ``pipeline`` and ``plain`` as in ``Predicted``."""

    layout: LayoutCandidate
    pipeline: float
    plain: int


@dataclass(frozen=True)
class LayoutTrial:
    """A layout to plan.

    ``least``: its lower bound, or ``None`` if that does not matter. ``likely``: effects of policies in
    similar layouts; ``surely``: their best effects. Planning stops early for a layout that would take
    ``below`` seconds or more.
    """

    layout: LayoutCandidate
    least: Bound | None = None
    likely: Policies = field(default_factory=dict)
    surely: Policies = field(default_factory=dict)
    below: float = inf

    @property
    def trace(self) -> TraceKey:
        return self.layout.cut, self.layout.micro, self.layout.stages == 1

    def again(self, plain: Predicted, policies: Policies) -> dict[str, float]:
        """Returns the seconds that each policy spends on recomputation so that the layout fits."""
        if self.least is None:
            return {}
        uneven = self.least.uneven(plain.pipeline, plain.plain)
        shares = self.least.again(uneven, policies)
        return {p: share * uneven.seconds * self.least.forward for p, share in shares.items()}

    def slow(self, plain: Predicted) -> bool:
        """Returns true if the layout is too slow under every policy."""
        again = min(self.again(plain, self.surely).values(), default=0.0)
        return NEAR * (plain.seconds + again) >= self.below < inf

    def policies(self, plain: Predicted) -> tuple[str, ...]:
        """Returns the policies that may be best for it."""
        takes = self.again(plain, self.likely)
        few = min(takes.values(), default=inf)
        return tuple(p for p in recompute_auto.POLICIES[1:] if takes.get(p, few) <= CLOSE * few)


def evaluate(context: SearchContext, trial: LayoutTrial, traces: Traces) -> Predicted | Unplannable | Slower:
    """Predicts a layout from its plan.

    If blocks are recomputed only as far as memory requires, it interpolates between plans that recompute no
    block and all blocks.
    """
    prediction = _evaluated(context, trial, traces)
    if not isinstance(prediction, Predicted) or context.job.search.measure:
        return prediction
    return replace(prediction, works=())


def _evaluated(
    context: SearchContext, trial: LayoutTrial, traces: Traces
) -> Predicted | Unplannable | Slower:
    layout = trial.layout
    job = context.job_of(layout)
    choosing = recompute_auto.is_requested(job)
    try:
        plain = plan_job(recompute_auto.with_policies(job, {}) if choosing else job, traces)
        if plain.estimate.step is None:
            return Unplannable(layout, "seconds are not predicted over device matrices")
        prediction = predicted(layout, plain)
        if not choosing or context.room is None or prediction.nbytes <= context.room:
            return prediction
        if trial.slow(prediction):
            return Slower(layout, prediction.pipeline, prediction.plain)
        return _fitted(
            prediction, job, plain, context.room, policies=trial.policies(prediction), traces=traces
        )
    except RequestError as error:
        return Unplannable(layout, "; ".join(f"{p.key}: {p.text}" for p in error.problems[:1]))


def predicted(layout: LayoutCandidate, plan: Plan) -> Predicted:
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
    """Returns the fastest prediction that fits in ``room``; the one with fewest bytes if none fits."""
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
    """Yields predictions with all blocks recomputed; modules keep the stages of ``like``."""
    blocks = recompute_auto.blocks(plan)
    for policy in policies if blocks else ():
        try:
            made = plan_like(recompute_auto.with_policies(job, dict.fromkeys(blocks, policy)), like, traces)
        except RequestError:  # this policy does not suit the model; another one may
            continue
        prediction = replace(predicted(plain.layout, made), policy=policy, again=1.0)
        yield replace(prediction, pipeline=plain.pipeline, plain=plain.plain)


def _between(none: Predicted, every: Predicted, room: int) -> Predicted:
    """Interpolates the fraction of recomputed blocks at which the layout needs exactly ``room`` bytes."""
    share = (none.nbytes - room) / (none.nbytes - every.nbytes)
    seconds = none.seconds + share * (every.seconds - none.seconds)
    both = zip(none.terms, every.terms, strict=True)
    terms = tuple((name, took + share * (more - took)) for (name, took), (_, more) in both)
    mfu = none.mfu * none.seconds / seconds
    works = (*none.works, *every.works)
    mixed = replace(every, seconds=seconds, mfu=mfu, nbytes=room, between=True)
    return replace(mixed, again=share, terms=terms, works=works)


def fits(prediction: Predicted, room: int | None) -> bool:
    return room is None or prediction.nbytes <= room


def best(predictions: Sequence[Predicted], room: int | None) -> list[Predicted]:
    """Returns the predictions that fit, fastest first."""
    return sorted((p for p in predictions if fits(p, room)), key=lambda p: p.order)


@dataclass(frozen=True)
class UndecidedLayout:
    """A layout that may be the best, whose recomputed blocks are still undecided."""

    prediction: Predicted

    @property
    def trace(self) -> TraceKey:
        layout = self.prediction.layout
        return layout.cut, layout.micro, layout.stages == 1


@dataclass(frozen=True)
class Finalist:
    """A layout whose settings are all decided, with its prediction.

    ``job``: the request with all settings decided; ``predicted``: the prediction of its plan.
    """

    job: Job
    predicted: Predicted


def settle(context: SearchContext, choice: UndecidedLayout, traces: Traces) -> Finalist | Unplannable:
    """Lets a plan choose the recomputed blocks; if it finds no choice, recomputes all of them."""
    prediction, job = choice.prediction, context.job_of(choice.prediction.layout)
    if not recompute_auto.is_requested(job):
        return Finalist(job, prediction)
    if not prediction.again:
        return Finalist(recompute_auto.with_policies(job, {}), prediction)
    try:
        return _finalist(prediction, job, plan_job(job, traces))
    except RequestError:
        every = _recompute_all(prediction, job, traces)
    if every is not None and fits(every.predicted, context.room):
        return every
    return Unplannable(
        prediction.layout, f"{prediction.policy}: slightly too large even if all blocks are recomputed"
    )


def _recompute_all(prediction: Predicted, job: Job, traces: Traces) -> Finalist | None:
    """Recomputes all blocks, in stages that are balanced for that; ``None`` if it cannot be planned."""
    try:
        blocks = recompute_auto.blocks(plan_job(recompute_auto.with_policies(job, {}), traces))
        every = recompute_auto.with_policies(job, dict.fromkeys(blocks, prediction.policy))
        return _finalist(prediction, every, plan_job(every, traces))
    except RequestError:
        return None


def _finalist(prediction: Predicted, job: Job, plan: Plan) -> Finalist:
    blocks, policies = recompute_auto.blocks(plan), {r.policy for r in plan.recomputed}
    share = len(plan.recomputed) / max(len(blocks), 1)
    exact = predicted(prediction.layout, plan)
    return Finalist(job, replace(exact, again=share, policy=" and ".join(sorted(policies))))


@dataclass(frozen=True)
class OneSample:
    """Layouts with the same cut, one for each number of stages."""

    layouts: tuple[LayoutCandidate, ...]

    @property
    def trace(self) -> TraceKey:
        return self.layouts[0].cut, 1, all(layout.stages == 1 for layout in self.layouts)


def model_cost(context: SearchContext, sample: OneSample, traces: Traces) -> ModelCost | str:
    """Returns the cost of the model, or why it cannot be planned.

    Uses the fewest stages, but several if possible.
    """
    kept = traces.keeps_messages
    planned = _planned(context, sample, traces)
    if isinstance(planned, str):
        return planned
    _, plan = planned
    return bounds.model_cost(plan, context.speeds, keeps_messages() if kept is None else kept)


def growth(context: SearchContext, sample: OneSample, traces: Traces) -> float:
    """Returns the seconds of a second sample relative to those of the first. The sample must have a plan."""
    planned = _planned(context, sample, traces)
    assert not isinstance(planned, str), planned
    layout, plan = planned
    return bounds.growth(plan, plan_job(_unsharded(context, layout, 2), traces), context.speeds)


def _planned(context: SearchContext, sample: OneSample, traces: Traces) -> tuple[LayoutCandidate, Plan] | str:
    why = ""
    for layout in sorted(sample.layouts, key=lambda one: (one.stages == 1, one.stages)):
        try:
            return layout, plan_job(_unsharded(context, layout), traces)
        except RequestError as error:
            why = f"{error.problems[0].key}: {error.problems[0].text}"
    return why


def _unsharded(context: SearchContext, layout: LayoutCandidate, micro: int = 1) -> Job:
    """Returns the request for ``layout`` with unsharded weights and without recomputation.

    A micro batch has ``micro`` samples.
    """
    job = job_of(context.job, layout, context.named)
    pipe = job.parallel.pipeline.model_copy(
        update={"micro_batch_num": layout.stages, "scheduler": "1f1b", "interleave": False}
    )
    parallel = job.parallel.model_copy(update={"pipeline": pipe, "hsdp": None, "recompute": None})
    train = job.train.model_copy(update={"batch_size": layout.replicas * layout.stages * micro})
    return job.model_copy(update={"parallel": parallel, "train": train})
