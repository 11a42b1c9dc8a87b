"""Searches layouts, best first."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Protocol, TypeVar

from launcher.errors import Problem, RequestError, refuse
from launcher.extras.layout_search import candidates
from launcher.extras.layout_search import evaluate as evaluation
from launcher.extras.layout_search.bounds import (
    FAR,
    NEAR,
    UNSEEN,
    Bound,
    Effect,
    Imbalance,
    ModelCost,
    Policies,
    bound,
)
from launcher.extras.layout_search.candidates import LayoutCandidate, TpChoice, TraceKey
from launcher.extras.layout_search.evaluate import (
    Finalist,
    LayoutTrial,
    OneSample,
    Predicted,
    SearchContext,
    Slower,
    UndecidedLayout,
    Unplannable,
    evaluate,
    settle,
)
from launcher.extras.layout_search.if_none_fits import best_change
from launcher.extras.layout_search.show import Ranking, nothing
from launcher.job.schema.job import Job
from launcher.job.schema.search import AUTO
from launcher.plan.schedule.schedules import RULES
from launcher.plan.time.speeds import speeds
from launcher.planner.trace_model import Traces
from launcher.process_pool import Start, Workers, workers

ROOMY = 0.85
"""A layout certainly fits if its bound is below this fraction of the memory."""

Shape = tuple[str, int, int, int]
Family = tuple[TpChoice, Shape]
"""Layouts that differ only in how weights and optimizer states are sharded."""


@dataclass(frozen=True)
class PlannedStatistics:
    """What the plans of a family have shown."""

    uneven: Imbalance
    policies: Policies


@dataclass
class CandidateQueue:
    """Layouts that may be the best, the one with the smallest lower bound first.

    A plan shows how uneven its pipeline is, and what recomputation frees and costs in it. The layouts of its
    family have the same values, and pipelines with more stages are at least as uneven.
    """

    context: SearchContext
    costs: Mapping[TpChoice, ModelCost | str]
    heap: list[tuple[float, tuple[Any, ...], LayoutCandidate]] = field(default_factory=list)
    least: dict[LayoutCandidate, Bound] = field(default_factory=dict)
    families: dict[Family, PlannedStatistics] = field(default_factory=dict)
    kinds: dict[tuple[str, bool, TpChoice], Policies] = field(default_factory=dict)

    @property
    def free(self) -> bool:
        """True if the search decides the number of stages."""
        over = self.context.job.search.over
        return AUTO in (over.get(candidates.STAGES), over.get(candidates.CHUNKS))

    def add(self, layout: LayoutCandidate) -> Bound | str:
        """Queues a layout unless it cannot fit; returns its bound, or why it cannot be planned."""
        of = self.costs[layout.cut]
        if isinstance(of, str):
            return of
        virtual = layout.stages * (2 if RULES[layout.scheduler].v and layout.stages > 1 else layout.chunks)
        if of.blocks and virtual > of.blocks and self.free:
            return "more virtual stages than blocks"
        least = bound(layout, of, self.context.speeds, self.context.job)
        if self.context.room is None or least.nbytes <= self.context.room:
            self.least[layout] = least
            heappush(self.heap, (self.seconds(layout), layout.order, layout))
        return least

    def take(self, most: int, below: float) -> list[LayoutCandidate]:
        """Returns up to ``most`` layouts with different pipelines that may take less than ``below`` s."""
        out: list[LayoutCandidate] = []
        put_back = []
        while self.heap and len(out) < most and self.heap[0][0] < below:
            seconds, order, layout = heappop(self.heap)
            known = self.seconds(layout)
            if known > seconds:
                heappush(self.heap, (known, order, layout))
            elif any(layout.shape == other.shape for other in out):
                put_back.append((seconds, order, layout))
            else:
                out.append(layout)
        for one in put_back:
            heappush(self.heap, one)
        return out

    def plain(self) -> list[LayoutCandidate]:
        """Returns the first simple layout of each cut that certainly fits without recomputation.

        These are likely good.
        """
        by_cut: dict[TpChoice, LayoutCandidate] = {}
        room = self.context.room
        for _, _, layout in sorted(self.heap):
            least = self.least[layout]
            simple = layout.scheduler == "1f1b" and layout.chunks == 1
            if simple and (room is None or least.states + least.kept < ROOMY * room):
                by_cut.setdefault(layout.cut, layout)
        taken = set(by_cut.values())
        self.heap = [one for one in self.heap if one[-1] not in taken]
        heapify(self.heap)
        return list(by_cut.values())

    def seconds(self, layout: LayoutCandidate) -> float:
        """Returns the lower bound of the seconds, as known so far; ``inf`` if the layout does not fit."""
        least, seen = self.least[layout], self.families.get(_family(layout))
        if seen is not None:
            return least.seconds(seen.uneven, self._bounding_policies(layout), NEAR)
        return least.seconds(self._uneven(layout), self._bounding_policies(layout), FAR)

    def trial(self, layout: LayoutCandidate, below: float) -> LayoutTrial:
        """Returns the layout with its bound and the expected effects of policies."""
        return LayoutTrial(
            layout, self.least[layout], self._likely_policies(layout), self._bounding_policies(layout), below
        )

    def _bounding_policies(self, layout: LayoutCandidate) -> Policies:
        """Returns effects for bounds: its family's, else its kind's, else those of similar schedulers.

        Similar schedulers have equal backwards.
        """
        seen = self.families.get(_family(layout))
        if seen is not None and seen.policies:
            return {**UNSEEN, **seen.policies}
        kind = _kind(layout)
        split = RULES[kind[0]].split
        alike = (of for other, of in self.kinds.items() if RULES[other[0]].split == split)
        return {**UNSEEN, **(self.kinds.get(kind) or _together(alike))}

    def _likely_policies(self, layout: LayoutCandidate) -> Policies:
        """Returns likely effects: those of its family, else of its kind, else of the nearest kind."""
        seen = self.families.get(_family(layout))
        if seen is not None and seen.policies:
            return seen.policies
        scheduler, interleaved, cut = _kind(layout)
        nearest = min(
            self.kinds,
            key=lambda kind: ((kind[0], kind[1]) != (scheduler, interleaved), kind[2] != cut),
            default=None,
        )
        return {} if nearest is None else self.kinds[nearest]

    def _uneven(self, layout: LayoutCandidate) -> Imbalance:
        """Returns the imbalance that similar pipelines with at most as many stages have shown."""
        scheduler, stages, chunks, _ = layout.shape
        exact = [seen.uneven for (_, shape), seen in self.families.items() if shape == layout.shape]
        if exact:
            return Imbalance(min(one.seconds for one in exact), min(one.bytes for one in exact))

        every = [(shape, seen.uneven) for (_, shape), seen in self.families.items()]
        fewer = [
            uneven
            for (name, n, each, _), uneven in every
            if (name, each > 1) == (scheduler, chunks > 1) and n <= stages
        ]
        tight = [uneven.bytes for _, uneven in every if uneven.bytes > 1]
        return Imbalance(
            seconds=max((one.seconds for one in fewer), default=1.0),
            bytes=min(tight, default=1.0),
        )

    def learn(self, prediction: Predicted | Slower) -> None:
        """Records what a plan has shown; the least uneven pipeline of a family counts."""
        least, family, kind = (
            self.least[prediction.layout],
            _family(prediction.layout),
            _kind(prediction.layout),
        )
        uneven = least.uneven(prediction.pipeline, prediction.plain)
        policies = {} if isinstance(prediction, Slower) else _effects(prediction, least, uneven)
        before = self.families.get(family, PlannedStatistics(uneven, {}))
        both = Imbalance(min(uneven.seconds, before.uneven.seconds), min(uneven.bytes, before.uneven.bytes))
        self.families[family] = PlannedStatistics(both, _together((before.policies, policies)))
        if policies:
            self.kinds[kind] = _together((self.kinds.get(kind, {}), policies))


def _family(layout: LayoutCandidate) -> Family:
    return layout.cut, layout.shape


def _kind(layout: LayoutCandidate) -> tuple[str, bool, TpChoice]:
    """Returns the kind of a layout: equal kinds have about the same effects of recomputation."""
    return layout.scheduler, layout.chunks > 1, layout.cut


def _effects(prediction: Predicted, least: Bound, uneven: Imbalance) -> Policies:
    """Returns the effect of each policy that was tried."""
    frees = max(least.kept * uneven.bytes - least.handed, 1.0)
    forward = uneven.seconds * least.forward
    return {
        policy: (((prediction.plain - kept_bytes) / frees, more / forward),)
        for policy, kept_bytes, more in prediction.tried
    }


def _together(several: Iterable[Policies]) -> Policies:
    out: dict[str, tuple[Effect, ...]] = {}
    for one in several:
        for policy, seen in one.items():
            out[policy] = (*out.get(policy, ()), *seen)
    return out


FEW = 40
"""Up to this many layouts are planned before another process would have started."""
LAYOUTS_PER_ROUND = 12
"""Layouts to plan before the bounds of the remaining ones are compared again."""
GAIN = 0.01
"""A layout that is faster by a smaller share at best is not planned."""
FINALISTS = 2
"""Layouts whose recomputation is decided before one is chosen: earlier predictions err by a few percent."""
MOST_PLANS = 400
"""The most plans of a search; the report says how many layouts are left."""


def search(
    job: Job, processes: int = 1, traces: Traces | None = None, start: Start | None = None
) -> tuple[list[Finalist], Ranking]:
    """Returns the best layout, or as many as ``search.measure`` requests, and the ranking.

    The result does not depend on the number of ``processes``; ``start`` starts all but this one.

    Raises ``RequestError`` if the request cannot be searched, or if no layout fits.
    """
    refuse(candidates.impossible(job))
    fast = speeds(job)
    assert fast is not None
    space = candidates.space(job)
    context = SearchContext(job, space.named, fast)
    known = traces or Traces(own=False, shallow=True)
    ranking = Ranking(context, len(space.layouts) + space.out.total(), refused=space.out)
    with planners(context, known, processes if len(space.layouts) > FEW else 1, start) as work:
        _plan_in_rounds(_waiting(context, space.layouts, ranking, work), ranking, work)
        first = _finalists(ranking, work, _count(job))
        if not first:
            _leanest(ranking, work)
    if not first:
        other = best_change(job, partial(_least_bytes, traces=known)) if ranking.predictions else None
        raise RequestError((nothing(ranking, other),))
    return first, ranking


def _least_bytes(job: Job, traces: Traces) -> int | None:
    """Returns the fewest bytes of a planned layout; ``None`` if none can be planned."""
    fast = speeds(job)
    assert fast is not None
    space = candidates.space(job)
    ranking = Ranking(SearchContext(job, space.named, fast), len(space.layouts))
    with planners(ranking.question, traces) as work:
        waiting = _waiting(ranking.question, space.layouts, ranking, work)
        ranking.too_large += [(least.nbytes, layout) for layout, least in waiting.least.items()]
        _leanest(ranking, work)
    return min((one.nbytes for one in ranking.predictions), default=None)


def _leanest(ranking: Ranking, work: Planners) -> None:
    """Plans some of the layouts that are too large, to report by how much."""
    some = sorted(ranking.too_large, key=lambda one: (one[0], one[1].order))[:LAYOUTS_PER_ROUND]
    trials = [LayoutTrial(layout) for _, layout in some]
    ranking.predictions += [one for one in work(trials, evaluate) if isinstance(one, Predicted)]


def _waiting(
    context: SearchContext, layouts: Sequence[LayoutCandidate], ranking: Ranking, work: Planners
) -> CandidateQueue:
    """Returns a queue of the layouts that may fit; counts the others in ``ranking``."""
    out = CandidateQueue(context, _model_costs(context, layouts, work))
    refuse(list(_batch_dependent(out.costs.values(), layouts)))
    for layout in layouts:
        least = out.add(layout)
        if isinstance(least, str):
            ranking.refused[least] += 1
        elif layout not in out.least:
            ranking.too_large.append((least.nbytes, layout))
    return out


def _batch_dependent(
    costs: Iterable[ModelCost | str], layouts: Sequence[LayoutCandidate]
) -> Iterator[Problem]:
    """Refuses layouts that would compute different results."""
    sizes = sorted({layout.micro for layout in layouts})
    if len(sizes) > 1 and any(not isinstance(of, str) and of.batch_dependent for of in costs):
        text = "auto: what this model computes depends on the number of samples in a micro batch"
        text = f"{text}, and the micro batches of these layouts have {', '.join(map(str, sizes))}"
        yield Problem(candidates.MICROS, text)


def _model_costs(
    context: SearchContext, layouts: Sequence[LayoutCandidate], work: Planners
) -> dict[TpChoice, ModelCost | str]:
    """Returns the cost of the model on one rank of tp for each cut, or why it cannot be planned."""
    by_cut: dict[TpChoice, dict[int, LayoutCandidate]] = defaultdict(dict)
    for layout in layouts:
        by_cut[layout.cut].setdefault(layout.stages, layout)
    samples = [OneSample(tuple(mine.values())) for mine in by_cut.values()]
    out = dict(zip(by_cut, work(samples, evaluation.model_cost), strict=True))

    # the growth with samples is that of the first cut that can be planned
    able = [sample for sample, cut in zip(samples, by_cut, strict=True) if not isinstance(out[cut], str)]
    if not able or all(layout.micro == 1 for layout in layouts):
        return out
    grows = evaluation.growth(context, able[0], work.traces)
    return {cut: of if isinstance(of, str) else replace(of, grows=grows) for cut, of in out.items()}


def _plan_in_rounds(waiting: CandidateQueue, ranking: Ranking, work: Planners) -> None:
    """Plans the layouts that may be among the best, one round at a time."""
    count = _count(ranking.question.job)
    some, looked, below = waiting.plain(), 0, inf
    while some or not looked:
        looked += len(some)
        for one in work([waiting.trial(layout, below) for layout in some], evaluate):
            _noted(one, ranking, waiting)
        if looked >= MOST_PLANS:
            ranking.remaining = len(waiting.heap)
            return
        best = ranking.best
        below = (1 - GAIN) * best[count - 1].seconds if len(best) >= count else inf
        some = waiting.take(LAYOUTS_PER_ROUND, below)
        looked = max(looked, 1)
    too_large = [layout for seconds, _, layout in waiting.heap if seconds == inf]
    ranking.too_large += [(waiting.least[layout].nbytes, layout) for layout in too_large]
    ranking.beyond += len(waiting.heap) - len(too_large)


def _noted(one: Predicted | Unplannable | Slower, ranking: Ranking, waiting: CandidateQueue) -> None:
    if isinstance(one, Unplannable):
        ranking.refused[one.why] += 1
        return
    waiting.learn(one)
    if isinstance(one, Slower):
        ranking.beyond += 1
    else:
        ranking.predictions.append(one)


def _count(job: Job) -> int:
    """Returns the number of layouts to find."""
    return max(1, job.search.measure)


def _finalists(ranking: Ranking, work: Planners, count: int) -> list[Finalist]:
    """Returns the best ``count`` layouts that fit, after deciding which blocks the first few recompute."""
    settled: dict[LayoutCandidate, Finalist] = {}
    while ranking.best:
        some = ranking.best[: max(count, FINALISTS)]
        rest = [one for one in some if one.layout not in settled]
        if not rest:
            return [settled[one.layout] for one in some[:count]]
        for one, out in zip(rest, work([UndecidedLayout(one) for one in rest], settle), strict=True):
            at = ranking.predictions.index(one)
            if isinstance(out, Unplannable):
                del ranking.predictions[at]
                ranking.refused[out.why] += 1
            else:
                settled[one.layout] = out
                ranking.predictions[at] = out.predicted
    return []


COLLECTED = 50_000
"""New objects before Python looks for cycles: plans make many objects but few cycles."""
PLANNER = "a process that plans layouts for this search"


MOST_PROCESSES = 8


def processes() -> int:
    """Returns one process per core."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


class PlanningTask(Protocol):
    """A layout to plan."""

    @property
    def trace(self) -> TraceKey: ...


T = TypeVar("T", bound=PlanningTask)
R = TypeVar("R")


@dataclass(frozen=True)
class Planners:
    """Processes that plan layouts in parallel: this one, with its ``traces``, and ``others``."""

    context: SearchContext
    traces: Traces
    others: Workers

    def __call__(self, tasks: Sequence[T], do: Callable[[SearchContext, T, Traces], R]) -> list[R]:
        """Returns the result of each task, in order. A process that has traced a task's forward takes it."""
        elsewhere = partial(_in_child, do, self.context, self.traces.keeps_messages, self.traces.shallow)
        return list(
            self.others.map(
                elsewhere,
                tasks,
                prefer=lambda task: task.trace,
                here=lambda task: do(self.context, task, self.traces),
            )
        )


@contextmanager
def planners(
    context: SearchContext, traces: Traces, count: int = 1, start: Start | None = None
) -> Iterator[Planners]:
    """``count`` processes including this one, or only this one without ``start``; the others end at exit."""
    with ExitStack() as stack:
        others = (
            Workers([], PLANNER) if start is None else stack.enter_context(workers(count - 1, start, PLANNER))
        )
        stack.enter_context(_collected_seldom())
        yield Planners(context, traces, others)


@cache
def _traces(keeps_messages: bool | None, shallow: bool) -> Traces:
    """Returns the traces of a child, which it keeps for all tasks of the search."""
    return Traces(own=True, keeps_messages=keeps_messages, shallow=shallow)


def _in_child(
    do: Callable[[SearchContext, T, Traces], R],
    context: SearchContext,
    keeps_messages: bool | None,
    shallow: bool,
    task: T,
) -> R:
    with _collected_seldom():
        return do(context, task, _traces(keeps_messages, shallow))


@contextmanager
def _collected_seldom() -> Iterator[None]:
    """Makes garbage collections rare in this process while it plans."""
    often, *older = gc.get_threshold()
    gc.set_threshold(max(often, COLLECTED) if often else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(often, *older)
