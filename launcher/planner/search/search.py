"""Searches for the best layout of a request: plans only the layouts whose bound is good enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from launcher.errors import Problem, RequestError, refuse
from launcher.job.schema.job import Job
from launcher.plan.prediction.speeds import speeds
from launcher.planner.search import candidates, one_sample, single_change
from launcher.planner.search.bounds import Whole
from launcher.planner.search.evaluate import (
    Predicted,
    Question,
    Refused,
    Slower,
    Trial,
    evaluate,
)
from launcher.planner.search.layout import Cut, Layout
from launcher.planner.search.one_sample import OneSample
from launcher.planner.search.ranking import Ranking
from launcher.planner.search.settle import Choice, Finalist, settle
from launcher.planner.search.show_ranking import nothing
from launcher.planner.search.waiting import Waiting
from launcher.planner.search.workers import Start, Workers, workers
from launcher.planner.traces import Traces

FEW = 40
"""Up to this many layouts are planned before another process would have started."""
ROUND = 12
"""Layouts to plan before the bounds of the remaining ones are compared again."""
GAIN = 0.01
"""A layout that is faster by a smaller share at best is not planned."""
FINALISTS = 2
"""Layouts whose recomputation is decided before one is chosen: earlier predictions err by a few percent."""
MOST = 400
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
    there = candidates.space(job)
    asked = Question(job, there.named, fast)
    known = traces or Traces(own=False, shallow=True)
    ranking = Ranking(asked, len(there.layouts) + there.out.total(), refused=there.out)
    with workers(asked, known, processes if len(there.layouts) > FEW else 1, start) as work:
        _look(_waiting(asked, there.layouts, ranking, work), ranking, work)
        first = _finalists(ranking, work, _count(job))
        if not first:
            _leanest(ranking, work)
    if not first:
        other = single_change.best(job, partial(_least_bytes, traces=known)) if ranking.found else None
        raise RequestError((nothing(ranking, other),))
    return first, ranking


def _least_bytes(job: Job, traces: Traces) -> int | None:
    """The fewest bytes of a planned layout; ``None`` if none can be planned."""
    fast = speeds(job)
    assert fast is not None
    there = candidates.space(job)
    ranking = Ranking(Question(job, there.named, fast), len(there.layouts))
    with workers(ranking.question, traces, 1) as work:
        waiting = _waiting(ranking.question, there.layouts, ranking, work)
        ranking.too_large += [(least.nbytes, layout) for layout, least in waiting.least.items()]
        _leanest(ranking, work)
    return min((one.nbytes for one in ranking.found), default=None)


def _leanest(ranking: Ranking, work: Workers) -> None:
    """Plans some of the layouts that are too large, to report by how much."""
    some = sorted(ranking.too_large, key=lambda one: (one[0], one[1].order))[:ROUND]
    trials = [Trial(layout) for _, layout in some]
    ranking.found += [one for one in work(trials, evaluate) if isinstance(one, Predicted)]


def _waiting(asked: Question, layouts: Sequence[Layout], ranking: Ranking, work: Workers) -> Waiting:
    """A queue of the layouts that may fit; counts the others in ``ranking``."""
    out = Waiting(asked, _wholes(asked, layouts, work))
    refuse(list(_batch_dependent(out.wholes.values(), layouts)))
    for layout in layouts:
        least = out.add(layout)
        if isinstance(least, str):
            ranking.refused[least] += 1
        elif layout not in out.least:
            ranking.too_large.append((least.nbytes, layout))
    return out


def _batch_dependent(wholes: Iterable[Whole | str], layouts: Sequence[Layout]) -> Iterator[Problem]:
    """Refuses layouts that would compute different results."""
    sizes = sorted({layout.micro for layout in layouts})
    if len(sizes) > 1 and any(not isinstance(of, str) and of.batch_dependent for of in wholes):
        text = "auto: what this model computes depends on the number of samples in a micro batch"
        text = f"{text}, and these layouts have {', '.join(map(str, sizes))} of them"
        yield Problem(candidates.MICROS, text)


def _wholes(asked: Question, layouts: Sequence[Layout], work: Workers) -> dict[Cut, Whole | str]:
    """The cost of the model on one rank of tp for each cut, or why it cannot be planned."""
    by_cut: dict[Cut, dict[int, Layout]] = defaultdict(dict)
    for layout in layouts:
        by_cut[layout.cut].setdefault(layout.stages, layout)
    samples = [OneSample(tuple(mine.values())) for mine in by_cut.values()]
    out = dict(zip(by_cut, work(samples, one_sample.whole), strict=True))

    # larger micro batches grow as in the first cut that can be planned
    able = [sample for sample, cut in zip(samples, by_cut, strict=True) if not isinstance(out[cut], str)]
    if not able or all(layout.micro == 1 for layout in layouts):
        return out
    grows = one_sample.growth(asked, able[0], work.traces)
    return {cut: of if isinstance(of, str) else replace(of, grows=grows) for cut, of in out.items()}


def _look(waiting: Waiting, ranking: Ranking, work: Workers) -> None:
    """Plans the layouts that may be among the best, one round at a time."""
    count = _count(ranking.question.job)
    some, looked, below = waiting.plain(), 0, inf
    while some or not looked:
        looked += len(some)
        for one in work([waiting.trial(layout, below) for layout in some], evaluate):
            _noted(one, ranking, waiting)
        if looked >= MOST:
            ranking.left = len(waiting.heap)
            return
        best = ranking.best
        below = (1 - GAIN) * best[count - 1].seconds if len(best) >= count else inf
        some = waiting.take(ROUND, below)
        looked = max(looked, 1)
    too_large = [layout for seconds, _, layout in waiting.heap if seconds == inf]
    ranking.too_large += [(waiting.least[layout].nbytes, layout) for layout in too_large]
    ranking.beyond += len(waiting.heap) - len(too_large)


def _noted(one: Predicted | Refused | Slower, ranking: Ranking, waiting: Waiting) -> None:
    if isinstance(one, Refused):
        ranking.refused[one.why] += 1
        return
    waiting.learn(one)
    if isinstance(one, Slower):
        ranking.beyond += 1
    else:
        ranking.found.append(one)


def _count(job: Job) -> int:
    """The number of layouts to find."""
    return max(1, job.search.measure)


def _finalists(ranking: Ranking, work: Workers, count: int) -> list[Finalist]:
    """The best ``count`` layouts that fit, after deciding which blocks the first few recompute."""
    settled: dict[Layout, Finalist] = {}
    while ranking.best:
        some = ranking.best[: max(count, FINALISTS)]
        rest = [one for one in some if one.layout not in settled]
        if not rest:
            return [settled[one.layout] for one in some[:count]]
        for one, out in zip(rest, work([Choice(one) for one in rest], settle), strict=True):
            at = ranking.found.index(one)
            if isinstance(out, Refused):
                del ranking.found[at]
                ranking.refused[out.why] += 1
            else:
                settled[one.layout] = out
                ranking.found[at] = out.predicted
    return []
