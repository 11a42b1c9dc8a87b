"""``recompute: auto``: chooses the blocks to recompute so that a step fits in memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, combinations_with_replacement, pairwise
from math import comb, prod

from launcher.errors import Problem
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import AUTO, Recompute
from launcher.plan.cut.stages import covers
from launcher.plan.memory.fits_cluster import tightest
from launcher.plan.memory.rank_loads import RankLoad
from launcher.plan.memory.walk import StageLoad
from launcher.plan.plan import Plan
from launcher.plan.resolve.recompute import KEY
from launcher.plan.values.model_graph import Segment
from launcher.plan.values.note import Note
from launcher.plan.values.text import bytes_text, many

Choice = dict[str, str]
"""The policy of each block."""


@dataclass(frozen=True)
class BlockPolicy:
    """A block under one policy: ``flops`` run again, bytes ``kept``, bytes of ``work`` in its backward.

    ``again``: some part of it runs again.
    """

    policy: str
    flops: int
    kept: int
    work: int
    again: bool = True


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks of one stage that have the same figures, in the order in which they run."""

    names: tuple[str, ...]
    ways: tuple[BlockPolicy, ...]
    in_flight: int = 1
    """The micro batches of the stage in flight at the moment when the rank keeps the most bytes."""


Cost = tuple[int, int]
"""Flops run again, then the number of blocks that run again: with equal flops, fewer blocks are cheaper."""


MOST_CHOICES = 1000
"""The most choices that are compared one by one."""


def countable(groups: Sequence[EqualBlocks]) -> bool:
    """Returns true if there are at most ``MOST_CHOICES`` choices."""
    return prod(comb(len(g.names) + len(g.ways) - 1, len(g.names)) for g in groups) <= MOST_CHOICES


def chosen(groups: Sequence[EqualBlocks], fits: Callable[[Choice], bool]) -> Choice | None:
    """Returns the ``cheapest`` choice if all can be compared, else a ``frugal`` one."""
    return cheapest(groups, fits) if countable(groups) else frugal(groups, fits)


def cheapest(groups: Sequence[EqualBlocks], fits: Callable[[Choice], bool]) -> Choice | None:
    """Returns the cheapest choice that ``fits``, or ``None`` if none does.

    For equal blocks, only the number of blocks under each policy is varied. The blocks whose
    backward needs most bytes come first: their backward runs when the later blocks have freed everything,
    and the blocks before them keep least. If a policy that keeps less needs more in its backward, no
    other order needs less memory.
    """
    ranked = [sorted(_mixtures(group), key=lambda mixture: mixture[0]) for group in groups]
    start = (0,) * len(ranked)
    waiting: list[tuple[Cost, tuple[int, ...]]] = []
    heappush(waiting, (_cost(ranked, start), start))
    seen = {start}
    while waiting:
        _, at = heappop(waiting)
        choice: Choice = {}
        for mixtures, i in zip(ranked, at, strict=True):
            choice |= mixtures[i][1]
        if fits(choice):
            return choice

        # the cheapest remaining choice is one step further in one group
        for n, i in enumerate(at):
            further = (*at[:n], i + 1, *at[n + 1 :])
            if i + 1 < len(ranked[n]) and further not in seen:
                seen.add(further)
                heappush(waiting, (_cost(ranked, further), further))
    return None


@dataclass(frozen=True)
class _Step:
    """Moves one more block of a group to the next leaner policy; ``price``: flops per freed byte."""

    price: float
    group: int
    leaner: int


def frugal(groups: Sequence[EqualBlocks], fits: Callable[[Choice], bool]) -> Choice | None:
    """Returns a choice that ``fits`` and costs little, or ``None``: it frees the cheapest bytes first.

    Bisection finds how many steps it takes, since a choice that fits also fits with more bytes free. Then
    each kind of step that turns out not to be needed is undone. If only kept bytes matter, the result is at
    most one block from the optimum (the bound of the relaxed knapsack problem).
    """
    leaner = [_leaner(group) for group in groups]
    steps = sorted(_steps(groups, leaner), key=lambda step: step.price)

    def after(taken: Sequence[_Step]) -> Choice:
        return _after(groups, leaner, Counter((step.group, step.leaner) for step in taken))

    few, many = 0, len(steps)
    if not fits(after(steps)):
        return _uniform(groups, fits)
    while few < many:
        half = (few + many) // 2
        few, many = (few, half) if fits(after(steps[:half])) else (half + 1, many)

    taken = steps[:many]
    for step in sorted(set(taken), key=lambda step: -step.price):
        fewer = list(taken)
        fewer.remove(step)
        while _stands(fewer, step) and fits(after(fewer)):
            taken = list(fewer)
            if step not in fewer:
                break
            fewer.remove(step)
    return after(taken)


def _uniform(groups: Sequence[EqualBlocks], fits: Callable[[Choice], bool]) -> Choice | None:
    """Returns the cheapest choice with one policy for all blocks that fits, or ``None``.

    The policy that keeps least may need most memory in a backward, so each one is tried.
    """
    ways = {way.policy: 0 for group in groups for way in group.ways}
    for group in groups:
        for way in group.ways:
            ways[way.policy] += way.flops * len(group.names)
    every = (
        {name: policy for group in groups for name in group.names}
        for policy in sorted(ways, key=ways.__getitem__)
    )
    return next((choice for choice in every if fits(choice)), None)


def _leaner(group: EqualBlocks) -> list[BlockPolicy]:
    """Returns the ways on the lower convex hull: each keeps less than the one before, at a rising price."""
    out: list[BlockPolicy] = []
    for way in sorted(group.ways, key=lambda w: (w.flops, w.again, w.kept)):
        if out and way.kept >= out[-1].kept:
            continue
        while len(out) > 1 and _price(out[-2], way, 1) <= _price(out[-2], out[-1], 1):
            out.pop()
        out.append(way)
    return out


def _price(one: BlockPolicy, other: BlockPolicy, in_flight: int) -> float:
    return (other.flops - one.flops) / ((one.kept - other.kept) * max(in_flight, 1))


def _steps(groups: Sequence[EqualBlocks], leaner: Sequence[Sequence[BlockPolicy]]) -> Iterator[_Step]:
    for n, (group, ways) in enumerate(zip(groups, leaner, strict=True)):
        for i, (one, other) in enumerate(pairwise(ways), 1):
            yield from [_Step(_price(one, other, group.in_flight), n, i)] * len(group.names)


def _stands(steps: Sequence[_Step], without: _Step) -> bool:
    """Returns true if no block takes a later step without the one in ``without``."""
    here, after = (
        sum(s.group == without.group and s.leaner == without.leaner + i for s in steps) for i in (0, 1)
    )
    return here >= after


def _after(
    groups: Sequence[EqualBlocks], leaner: Sequence[Sequence[BlockPolicy]], taken: Counter[tuple[int, int]]
) -> Choice:
    """Returns the choice after the steps ``taken``.

    In a group the blocks whose backward needs most bytes come first, as in ``cheapest``.
    """
    out: Choice = {}
    for n, (group, ways) in enumerate(zip(groups, leaner, strict=True)):
        reached = [len(group.names), *(taken[n, i] for i in range(1, len(ways))), 0]
        each = [way for i, way in enumerate(ways) for _ in range(reached[i] - reached[i + 1])]
        each.sort(key=lambda way: (-way.work, way.kept))
        out |= {name: way.policy for name, way in zip(group.names, each, strict=True)}
    return out


def _mixtures(group: EqualBlocks) -> Iterator[tuple[Cost, Choice]]:
    ways = sorted(group.ways, key=lambda way: (-way.work, way.kept))
    for taken in combinations_with_replacement(ways, len(group.names)):
        cost = (sum(w.flops for w in taken), sum(w.again for w in taken))
        yield cost, {name: way.policy for name, way in zip(group.names, taken, strict=True)}


def _cost(ranked: Sequence[Sequence[tuple[Cost, Choice]]], at: tuple[int, ...]) -> Cost:
    costs = [mixtures[i][0] for mixtures, i in zip(ranked, at, strict=True)]
    return sum(flops for flops, _ in costs), sum(blocks for _, blocks in costs)


NONE = "none"
POLICIES = (NONE, "selective", "full")


def is_requested(job: Job) -> bool:
    return job.parallel.recompute is not None and job.parallel.recompute.modules == AUTO


def with_policies(job: Job, choice: Mapping[str, str]) -> Job:
    """Returns ``job`` with the policy in ``choice`` for each block; blocks of policy ``NONE`` run once."""
    recompute = job.parallel.recompute
    modules = {name: policy for name, policy in choice.items() if policy != NONE}
    settings = recompute.model_dump() if recompute is not None else {}
    chosen = Recompute.model_validate(settings | {"modules": modules}) if modules else None
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"recompute": chosen})})


def blocks(plan: Plan) -> tuple[str, ...]:
    """Returns the repeated blocks, in call order.

    A block is a module that runs once, in a parent module that has several such modules.
    """
    loads = dict(stage for load in plan.estimate.loads for stage in load.stages)
    stages = [loads[n].passes[0].segments for n in sorted(loads)]
    often = Counter(s.module for segments in stages for s in segments)
    once = [module for module, n in often.items() if n == 1 and "." in module]
    beside = Counter(module.rpartition(".")[0] for module in once)
    return tuple(module for module in once if beside[module.rpartition(".")[0]] > 1)


def stage_of_modules(plan: Plan) -> dict[str, int]:
    """Returns the stage of each module that is called."""
    return {module: stage.index for stage in plan.stages for module in stage.modules}


@dataclass(frozen=True)
class Trials:
    """The plans of one request, one per policy, in which all ``blocks`` have that policy.

    ``room``: bytes of a rank's device; ``margin``: bytes of it to leave free.
    """

    plans: Mapping[str, Plan]
    blocks: tuple[str, ...]
    room: int
    margin: int = 0

    @cached_property
    def exact(self) -> bool:
        """True if ``choice`` is the optimum on every rank, because all choices can be compared."""
        return all(countable(list(self._groups(pp))) for pp in range(len(self.states)))

    def choice(self) -> Choice | None:
        """Returns the cheapest choice that fits, or a nearly cheapest one; ``None`` if a rank has none."""
        out: Choice = {}
        for pp in range(len(self.plans[NONE].estimate.loads)):
            rank_choice = chosen(list(self._groups(pp)), lambda choice, pp=pp: self.fits(pp, choice))  # type: ignore[misc]
            if rank_choice is None:
                return None
            out |= rank_choice
        return out

    def fits(self, pp: int, choice: Choice) -> bool:
        """Returns true if pipeline rank ``pp`` fits in memory, each block under its policy in ``choice``."""
        load = self.mixed(pp, choice)
        room = self.room - self.margin - self.states[pp]
        return _least_peak(load) <= room and load.fullest.total <= room

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Bytes of weights and optimizer states on the fullest rank of each pipeline rank."""
        plain = self.plans[NONE]
        each = {m.rank: m.params + m.optimizer for m in plain.estimate.memory}
        grid = plain.sizes.grid
        return tuple(max(each[rank] for rank in grid.ranks(pp=pp)) for pp in range(grid["pp"]))

    def mixed(self, pp: int, choice: Choice) -> RankLoad:
        """Returns the load of pipeline rank ``pp`` with each block under its policy in ``choice``."""
        loads = {policy: plan.estimate.loads[pp] for policy, plan in self.plans.items()}
        stages = []
        for n, (stage, plain) in enumerate(loads[NONE].stages):
            by_policy = {policy: load.stages[n][1] for policy, load in loads.items()}
            stages.append((stage, _mixed(plain, by_policy, choice)))
        return replace(loads[NONE], stages=tuple(stages))

    def _groups(self, pp: int) -> Iterator[EqualBlocks]:
        """Yields the blocks of each stage; blocks with the same figures form one group."""
        loads = {policy: plan.estimate.loads[pp] for policy, plan in self.plans.items()}
        in_flight_of = _in_flight(loads[NONE])
        for n in range(len(loads[NONE].stages)):
            alike: dict[tuple[BlockPolicy, ...], list[str]] = defaultdict(list)
            figures = {policy: _figures(load.stages[n][1]) for policy, load in loads.items()}
            for name in (m for m in figures[NONE] if m in self.blocks):
                alike[tuple(_way(policy, figures[policy][name]) for policy in self.plans)].append(name)
            in_flight = in_flight_of[loads[NONE].stages[n][0]]
            yield from (EqualBlocks(tuple(names), ways, in_flight) for ways, names in alike.items())


def _figures(load: StageLoad) -> dict[str, list[Segment]]:
    """Returns the segments of each module, one per pass."""
    out: dict[str, list[Segment]] = defaultdict(list)
    for one in load.passes:
        for segment in one.segments:
            out[segment.module].append(segment)
    return out


def _way(policy: str, segments: list[Segment]) -> BlockPolicy:
    return BlockPolicy(
        policy,
        flops=sum(s.backward.again for s in segments),
        kept=sum(s.saved for s in segments),
        work=max(s.backward.work for s in segments),
        again=policy != NONE,
    )


def _mixed(plain: StageLoad, loads: Mapping[str, StageLoad], choice: Choice) -> StageLoad:
    """Returns ``plain`` with the segments of each block taken from the load of its policy."""
    passes = []
    for n, one in enumerate(plain.passes):
        named = {policy: {s.module: s for s in load.passes[n].segments} for policy, load in loads.items()}
        segments = (
            named[choice[s.module]][s.module] if choice.get(s.module, NONE) != NONE else s
            for s in one.segments
        )
        passes.append(replace(one, segments=tuple(segments)))
    return replace(plain, passes=tuple(passes))


def _least_peak(load: RankLoad) -> int:
    """Returns a lower bound of the peak: the most bytes that micro batches in flight keep for backwards.

    Returns 0 if a backward is split or a sequence is cut: less of a micro batch may be kept then.
    """
    if any(a.kind not in "FB" for a in load.row) or any(len(stage.passes) > 1 for _, stage in load.stages):
        return 0
    each = {n: sum(s.saved for s in stage.passes[0].segments) for n, stage in load.stages}
    changes = (each[a.stage] if a.kind == "F" else -each[a.stage] for a in load.row)
    return max(accumulate(changes), default=0)


def _in_flight(load: RankLoad) -> Counter[int]:
    """Returns the micro batches of each stage in flight at the moment when they keep the most bytes."""
    each = {n: sum(s.saved for one in stage.passes for s in one.segments) for n, stage in load.stages}
    now: Counter[int] = Counter()
    most, kept = now, 0
    for a in load.row:
        now = now + Counter({a.stage: 1}) if a.kind == "F" else now
        now = now - Counter({a.stage: 1}) if a.kind in "BW" else now
        if (bytes_held := sum(each[n] * count for n, count in now.items())) > kept:
            most, kept = now, bytes_held
    return most


def memory_not_stated(job: Job) -> list[Problem]:
    """Returns the problem of ``auto`` in a request that does not state the memory of a device."""
    if not is_requested(job) or job.cluster.memory_gb is not None:
        return []
    text = "auto: the memory of a device is unknown; set cluster.memory_gb"
    return [Problem(KEY, text, "cluster.memory_gb=80")]


def too_little(plans: Iterable[Plan], room: int, cure: str) -> Problem:
    """Returns the problem that no plan fits ``room``, with the bytes of the plan that needs least memory."""
    least = min((tightest(plan.estimate.memory, room) for plan in plans), key=lambda fit: fit.needed)
    return Problem(KEY, f"auto: however many blocks run again, a step {least}", cure)


def note(plan: Plan, blocks: tuple[str, ...], room: int, *, exact: bool = True) -> Note:
    """Returns a note about the chosen blocks; ``exact``: all choices were compared."""
    again = [b for b in blocks if any(covers(r.module, b) for r in plan.recomputed)]
    fitting = f"to fit {bytes_text(room)}"
    if not again:
        return Note(KEY, f"auto -> null: no block needs recomputation {fitting}")
    flops = plan.sizes.micros * sum(r.flops for r in plan.estimate.rerun)
    total = 3 * plan.sizes.micros * sum(s.flops for s in plan.stages)
    run = "runs" if len(again) == 1 else "run"
    text = f"auto -> {len(again)} of {many(len(blocks), 'block')} {run} again {fitting}"
    least = "no choice adds less" if exact else "there are too many choices to try all"
    return Note(KEY, f"{text}, which adds {flops / max(total, 1):.1%} to a step's flops; {least}")
