"""The best layout of those that a request leaves open, by plans of the ones that may be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any

from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.job import Job
from launcher.job.schema.search import AUTO
from launcher.plan.plan import Plan
from launcher.plan.prediction.speeds import speeds
from launcher.plan.schedule.schedules import RULES
from launcher.planner.plan_job import plan_job
from launcher.planner.search import candidates, single_change
from launcher.planner.search.bounds import UNSEEN, Bound, Policies, Uneven, Whole, bound, growth, whole
from launcher.planner.search.evaluate import Predicted, Question, Refused, chosen
from launcher.planner.search.layout import Layout, job_of
from launcher.planner.search.ranking import Ranking
from launcher.planner.search.show_ranking import nothing
from launcher.planner.search.workers import workers
from launcher.planner.trace_model import keeps_messages
from launcher.planner.traces import Traces

Cut = tuple[int, str]
"""Ranks of tp, and the name of the operators that are cut over them."""

FEW = 40
"""So many layouts are planned sooner than another process has started."""
ROUND = 8
"""Layouts that are planned before it is asked again which may still be."""
ROOMY = 0.85
"""A layout that fits by far takes no more than so much of the memory by its bound."""
SEEN = 0.9
"""Of what running again was seen to take elsewhere it takes so much at least here."""
MOST = 400
"""Plans of a search; what is left then is said."""


Work = Callable[[Sequence[Layout]], list[Predicted | Refused]]


@dataclass(frozen=True)
class Finalist:
    """``job``: the request, with nothing left open; ``predicted``: by its plan."""

    job: Job
    predicted: Predicted


def search(job: Job, processes: int = 1, traces: Traces | None = None) -> tuple[list[Finalist], Ranking]:
    """The best layout, or as many as ``search.measure`` asks for, and what was looked at.

    It is the same by any number of ``processes``.

    Raises ``RequestError`` where nothing can be searched for, and where nothing fits.
    """
    refuse(candidates.impossible(job))
    fast = speeds(job)
    assert fast is not None
    there = candidates.space(job)
    asked = Question(job, there.named, fast)
    known = traces or Traces(own=False)
    ranking = Ranking(asked, len(there.layouts) + there.out.total(), refused=there.out)
    waiting = _waiting(asked, there.layouts, ranking, known)
    with workers(asked, known, processes if len(waiting.heap) > FEW else 1) as work:
        _look(waiting, ranking, work)
        first = _finalists(ranking, known, max(1, job.search.measure))
        if not first:
            _leanest(ranking, work)
    if not first:
        other = single_change.best(job, partial(_least_bytes, traces=known)) if ranking.found else None
        raise RequestError((nothing(ranking, other),))
    return first, ranking


def _least_bytes(job: Job, traces: Traces) -> int | None:
    """Of the leanest layout that is planned; ``None`` where there is none."""
    fast = speeds(job)
    assert fast is not None
    there = candidates.space(job)
    ranking = Ranking(Question(job, there.named, fast), len(there.layouts))
    waiting = _waiting(ranking.question, there.layouts, ranking, traces)
    ranking.too_large += [(least.nbytes, layout) for layout, least in waiting.least.items()]
    with workers(ranking.question, traces, 1) as work:
        _leanest(ranking, work)
    return min((one.nbytes for one in ranking.found), default=None)


def _leanest(ranking: Ranking, work: Work) -> None:
    """Plans some of those that are too large, to say by how much."""
    some = sorted(ranking.too_large, key=lambda one: (one[0], one[1].order))[:ROUND]
    ranking.found += [one for one in work([layout for _, layout in some]) if isinstance(one, Predicted)]


def _waiting(asked: Question, layouts: Sequence[Layout], ranking: Ranking, traces: Traces) -> Waiting:
    """Those that may fit; what does not is counted."""
    out = Waiting(asked, _wholes(asked, layouts, traces))
    refuse(list(_batch_dependent(out.wholes.values(), layouts)))
    for layout in layouts:
        least = out.add(layout)
        if isinstance(least, str):
            ranking.refused[least] += 1
        elif layout not in out.least:
            ranking.too_large.append((least.nbytes, layout))
    return out


def _batch_dependent(wholes: Iterable[Whole | str], layouts: Sequence[Layout]) -> Iterator[Problem]:
    """Layouts that would train other numbers than each other."""
    sizes = sorted({layout.micro for layout in layouts})
    if len(sizes) > 1 and any(not isinstance(of, str) and of.batch_dependent for of in wholes):
        text = "auto: what this model computes hangs on the samples of a micro batch"
        text = f"{text}, and these layouts have {', '.join(map(str, sizes))} of them"
        yield Problem(candidates.MICROS, text)


def _wholes(asked: Question, layouts: Sequence[Layout], traces: Traces) -> dict[Cut, Whole | str]:
    """The model on one rank of tp, by how its operators are cut; or why there is no plan of that."""
    by_cut: dict[Cut, list[Layout]] = defaultdict(list)
    for layout in layouts:
        by_cut[layout.tp, layout.operators].append(layout)
    kept = traces.keeps_messages
    keeps = keeps_messages() if kept is None else kept

    # what larger micro batches take is as in the first that can be planned
    out: dict[Cut, Whole | str] = {}
    grows = None
    for cut, mine in by_cut.items():
        plan = _one_sample(asked, mine, traces)
        if isinstance(plan, str):
            out[cut] = plan
            continue
        if grows is None and any(layout.micro > 1 for layout in layouts):
            one = next(x for x in mine if x.stages == plan.sizes.grid["pp"])
            grows = growth(plan, plan_job(_unsharded(asked, one, 2), traces), asked.speeds)
        out[cut] = replace(whole(plan, asked.speeds, keeps), grows=1.0 if grows is None else grows)
    return out


def _one_sample(asked: Question, layouts: Sequence[Layout], traces: Traces) -> Plan | str:
    """By the fewest stages that these layouts have and that a plan can have; several, if there are."""
    why = ""
    for stages in sorted({layout.stages for layout in layouts}, key=lambda n: (n == 1, n)):
        one = next(layout for layout in layouts if layout.stages == stages)
        try:
            return plan_job(_unsharded(asked, one), traces)
        except RequestError as error:
            why = f"{error.problems[0].key}: {error.problems[0].text}"
    return why


def _unsharded(asked: Question, layout: Layout, micro: int = 1) -> Job:
    """As ``layout``, with whole weights, nothing run again, and micro batches of so many samples."""
    job = job_of(asked.job, layout, asked.named)
    pipe = job.parallel.pipeline.model_copy(
        update={"micro_batch_num": layout.stages, "scheduler": "1f1b", "interleave": False}
    )
    parallel = job.parallel.model_copy(update={"pipeline": pipe, "hsdp": None, "recompute": None})
    train = job.train.model_copy(update={"batch_size": layout.replicas * layout.stages * micro})
    return job.model_copy(update={"parallel": parallel, "train": train})


@dataclass
class Waiting:
    """Layouts that may be the best, the one that takes least at least first.

    The plan of one layout says how uneven a pipeline of its shape is.
    """

    asked: Question
    wholes: Mapping[Cut, Whole | str]
    heap: list[tuple[float, tuple[Any, ...], Layout]] = field(default_factory=list)
    least: dict[Layout, Bound] = field(default_factory=dict)
    uneven: dict[tuple[str, int, int, int], Uneven] = field(default_factory=dict)
    policies: Policies = UNSEEN

    @property
    def free(self) -> bool:
        """Whether it is left to the search how many stages there are."""
        over = self.asked.job.search.over
        return AUTO in (over.get(candidates.STAGES), over.get(candidates.CHUNKS))

    def add(self, layout: Layout) -> Bound | str:
        """Unless it does not fit, or nothing can be cut so."""
        of = self.wholes[layout.tp, layout.operators]
        if isinstance(of, str):
            return of
        virtual = layout.stages * (2 if RULES[layout.scheduler].v and layout.stages > 1 else layout.chunks)
        if of.blocks and virtual > of.blocks and self.free:
            return "more virtual stages than blocks"
        least = bound(layout, of, self.asked.speeds, self.asked.job)
        if self.asked.room is None or least.nbytes <= self.asked.room:
            self.least[layout] = least
            heappush(self.heap, (least.seconds(Uneven(), UNSEEN), layout.order, layout))
        return least

    def take(self, most: int, below: float) -> list[Layout]:
        """So many that may take less than ``below``, each with a pipeline of another shape."""
        out: list[Layout] = []
        put_back = []
        while self.heap and len(out) < most and self.heap[0][0] < below:
            seconds, order, layout = heappop(self.heap)
            known = self.least[layout].seconds(self.uneven.get(layout.shape, Uneven()), self.policies)
            if known > seconds:
                heappush(self.heap, (known, order, layout))
            elif any(layout.shape == other.shape for other in out):
                put_back.append((seconds, order, layout))
            else:
                out.append(layout)
        for one in put_back:
            heappush(self.heap, one)
        return out

    def plain(self) -> list[Layout]:
        """The first of each cut that fits by far with nothing run again: one of them may be good soon."""
        found: dict[Cut, Layout] = {}
        room = self.asked.room
        for _, _, layout in sorted(self.heap):
            least = self.least[layout]
            simple = layout.scheduler == "1f1b" and layout.chunks == 1
            if simple and (room is None or least.states + least.kept < ROOMY * room):
                found.setdefault((layout.tp, layout.operators), layout)
        taken = set(found.values())
        self.heap = [one for one in self.heap if one[-1] not in taken]
        heapify(self.heap)
        return list(found.values())

    def learn(self, found: Predicted) -> None:
        """The least uneven pipeline of a shape counts."""
        least, shape = self.least[found.layout], found.layout.shape
        seconds = found.pipeline / least.pipeline
        nbytes = (found.plain - least.states) / max(least.kept, 1.0)
        known = self.uneven.get(shape, Uneven(seconds, nbytes))
        now = Uneven(max(1.0, min(seconds, known.seconds)), max(1.0, min(nbytes, known.bytes)))
        self.uneven[shape] = now
        seen = tuple(
            (
                (found.plain - left) / max(least.kept * now.bytes - least.handed, 1.0),
                SEEN * more / (now.seconds * least.forward),
            )
            for left, more in found.tried
        )
        if seen:
            self.policies = seen if self.policies is UNSEEN else _least(seen, self.policies)


def _least(one: Policies, other: Policies) -> Policies:
    """The most that each policy was seen to free, for the least."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=False))


def _look(waiting: Waiting, ranking: Ranking, work: Work) -> None:
    """Plans what may be the best, a round at a time."""
    some, looked = waiting.plain(), 0
    while some or not looked:
        looked += len(some)
        for one in work(some):
            if isinstance(one, Refused):
                ranking.refused[one.why] += 1
            else:
                ranking.found.append(one)
                waiting.learn(one)
        if looked >= MOST:
            ranking.left = len(waiting.heap)
            return
        first = ranking.best[0].seconds if ranking.best else float("inf")
        some = waiting.take(ROUND, first)
        looked = max(looked, 1)
    ranking.beyond = len(waiting.heap)


def _finalists(ranking: Ranking, traces: Traces, count: int) -> list[Finalist]:
    """The first ``count`` of those that fit, once it is settled which of their blocks run again."""
    settled: dict[Layout, Job] = {}
    while ranking.best:
        first = ranking.best[:count]
        one = next((one for one in first if one.layout not in settled), None)
        if one is None:
            return [Finalist(settled[one.layout], one) for one in first]
        try:
            settled[one.layout], exact = chosen(ranking.question, one, traces)
        except RequestError as error:
            ranking.found.remove(one)
            ranking.refused[error.problems[0].text] += 1
        else:
            ranking.found[ranking.found.index(one)] = exact
    return []
