"""Cuts compared with all possible cuts, each simulated independently of the code that searches for cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from launcher.plan.balance.layer_chain import Cut, LayerChain, Run
from launcher.plan.balance.partition import balanced
from launcher.plan.schedule import schedules
from launcher.plan.schedule.schedules import Schedule
from launcher.plan.schedule.simulate import Cost, makespan, order, simulate

SCHEDULERS = {"1f1b": (1, 2), "gpipe": (1, 2), "zero_bubble_h1": (1,), "zero_bubble_v": (2,), "dualpipe_v": (2,)}
"""The schedulers, with the numbers of stages per rank that are tried."""
PHASES = (Phase.explicit, Phase.generate)  # a case takes too long to shrink


@dataclass(frozen=True)
class Case:
    """``forward``, ``backward`` and ``nbytes`` of each part."""

    scheduler: str
    ranks: int
    chunks: int
    micros: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    nbytes: tuple[int, ...]

    @cached_property
    def places(self) -> tuple[int, ...]:
        return schedules.placement(self.ranks, self.chunks, schedules.RULES[self.scheduler].v)

    @cached_property
    def schedule(self) -> Schedule:
        return schedules.build(self.scheduler, self.ranks, self.chunks, self.micros)

    def cost(self, cut: Cut) -> Cost:
        runs = [slice(cut[s], cut[s + 1]) for s in range(len(self.places))]
        return Cost(
            tuple(sum(self.forward[r]) for r in runs), tuple(sum(self.backward[r]) for r in runs), (0,) * len(runs)
        )

    def rank_bytes(self, rank: int, runs: tuple[Run, ...]) -> int:
        """Count each part once, and once more for each micro batch that is in flight at first."""
        return sum(sum(self.nbytes[i:j]) * (1 + self.ahead[s]) for s, i, j in runs)

    @cached_property
    def ahead(self) -> tuple[int, ...]:
        rows = [[a.kind for a in self.schedule[r] if a.stage == s] for s, r in enumerate(self.places)]
        return tuple(next(i for i, kind in enumerate(row) if kind != "F") for row in rows)

    def row(self, tries: int = 200) -> LayerChain:
        steps = order(self.schedule, self.places)
        return LayerChain(
            forward=self.forward,
            backward=self.backward,
            places=self.places,
            micros=self.micros,
            ahead=self.ahead,
            split=schedules.RULES[self.scheduler].split,
            state=self.nbytes,
            saved=self.nbytes,
            flying=self.ahead,
            step=lambda cut: makespan(steps, self.cost(cut)),
            rank_bytes=self.rank_bytes,
            tries=tries,
        )

    def step(self, cut: Cut) -> float:
        return simulate(self.schedule, self.places, self.cost(cut)).makespan

    def fullest(self, cut: Cut) -> int:
        runs = [(s, cut[s], cut[s + 1]) for s in range(len(self.places))]
        each = [tuple(run for run in runs if self.places[run[0]] == rank) for rank in range(self.ranks)]
        return max(self.rank_bytes(rank, mine) for rank, mine in enumerate(each))

    def every(self) -> Iterator[Cut]:
        for ends in combinations(range(1, len(self.forward)), len(self.places) - 1):
            yield (0, *ends, len(self.forward))


@st.composite
def cases(draw: st.DrawFn, most: int = 10) -> Case:
    """Draw a case like a transformer, with light and heavy ends, or an arbitrary one."""
    scheduler = draw(st.sampled_from(sorted(SCHEDULERS)))
    ranks, chunks = draw(st.integers(2, 4)), draw(st.sampled_from(SCHEDULERS[scheduler]))
    stages = ranks * chunks
    parts = draw(st.integers(stages, max(stages, most)))
    time = st.sampled_from([0.01, 0.3, 1.0, 1.7, 4.0])
    times = draw(st.one_of(st.lists(time, min_size=parts, max_size=parts), _alike(parts)))
    back = draw(st.sampled_from([1.0, 2.0, 3.0]))
    micros = draw(st.sampled_from([stages if scheduler == "dualpipe_v" else ranks, 2 * stages]))
    nbytes = draw(st.lists(st.integers(1, 20), min_size=parts, max_size=parts))
    backward = tuple(back * t for t in times)
    return Case(scheduler, ranks, chunks, micros, tuple(times), backward, tuple(nbytes))


@st.composite
def _alike(draw: st.DrawFn, parts: int) -> list[float]:
    end = st.sampled_from([0.01, 0.5, 3.0])
    return [draw(end), *[1.0] * (parts - 2), draw(end)]


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(cases())
def test_no_cut_has_a_step_that_is_shorter_by_a_hundredth(case: Case) -> None:
    found = balanced(case.row()).cut
    assert case.step(found) <= 1.01 * min(map(case.step, case.every()))


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(cases(), st.floats(0.3, 1.2))
def test_the_shortest_step_that_fits_or_where_none_does_the_shortest(case: Case, share: float) -> None:
    sizes = {cut: case.fullest(cut) for cut in case.every()}
    room = int(share * max(sizes.values()))
    found = balanced(case.row(), room).cut
    fitting = [cut for cut, needed in sizes.items() if needed <= room]
    assert not fitting or sizes[found] <= room
    assert case.step(found) <= 1.01 * min(map(case.step, fitting or sizes))


@settings(max_examples=25, deadline=None, phases=PHASES)
@given(cases(most=13))
def test_with_one_stage_a_rank_few_of_many_cuts_have_to_be_tried(case: Case) -> None:
    if case.chunks > 1:
        return
    found = balanced(case.row(tries=20)).cut
    assert case.step(found) <= 1.01 * min(map(case.step, case.every()))


def case(times: str, ranks: int, chunks: int = 1, nbytes: tuple[int, ...] | None = None) -> Case:
    forward = tuple(map(float, times.split()))
    backward = tuple(2 * t for t in forward)
    return Case("1f1b", ranks, chunks, 4 * ranks, forward, backward, nbytes or (1,) * len(forward))


@pytest.mark.parametrize(
    ("times", "ranks"),
    [("0.01 1 1 1 1 1 1 0.01 1", 4), ("0.01 1 1 0.01 4", 4), ("0.01 1 1 1 1 0.01 2", 3), ("2 1 1 0.01 4", 4)],
)
def test_a_norm_is_no_stage_of_its_own(times: str, ranks: int) -> None:
    cut = balanced(case(times, ranks).row()).cut
    norm = len(times.split()) - 2
    assert (norm, norm + 1) not in set(pairwise(cut))


def test_if_memory_decides_the_faster_cut_is_reported() -> None:
    heavy = case("1 1 1 1 1 1", 2, nbytes=(9, 1, 1, 1, 1, 1))
    free = balanced(heavy.row())
    assert (free.cut, free.fastest) == ((0, 3, 6), (0, 3, 6))
    tight = balanced(heavy.row(), heavy.fullest((0, 3, 6)) - 1)
    assert (tight.cut, tight.fastest) == ((0, 2, 6), (0, 3, 6))


@pytest.mark.parametrize(("parts", "ranks", "chunks"), [(300, 64, 1), (100, 16, 1), (100, 16, 5), (200, 8, 8)])
def test_many_parts_are_balanced_with_few_tries(parts: int, ranks: int, chunks: int) -> None:
    """The slowest rank has at most one part more than the mean."""
    found = Case("1f1b", ranks, chunks, 2 * ranks, (1.0,) * parts, (2.0,) * parts, (1,) * parts)
    row = found.row(tries=8)
    times = row.loads(balanced(row).cut)
    assert max(times) <= 3 * parts / ranks + 3
