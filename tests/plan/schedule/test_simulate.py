from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.plan.schedule import schedules
from launcher.plan.schedule.schedules import Action, Schedule
from launcher.plan.schedule.simulate import Cost, Deadlock, Timeline, simulate

GRID = [(p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 4) for m in (p, p + 1, 2 * p, 3 * p - 1, 4 * p) if m >= p]
"""(ranks, chunks, micros)"""


def flat(stages: int, forward: int = 1, backward: int = 2, transfer: float = 0.0) -> Cost:
    """The same cost for every stage, with activations of one byte."""
    return Cost((forward,) * stages, (backward,) * stages, (1,) * stages, transfer)


def run(scheduler: str, ranks: int, chunks: int, micros: int, cost: Cost) -> Timeline:
    place = schedules.placement(ranks, chunks, schedules.RULES[scheduler].v)
    return simulate(schedules.build(scheduler, ranks, chunks, micros), place, cost)


def bubble_ratio(t: Timeline) -> float:
    """Return idle over working time of the busiest rank, as papers measure it: (p - 1) / m for 1F1B."""
    return (t.makespan - max(t.busy)) / max(t.busy)


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 5), (2, 1)])
@pytest.mark.parametrize(("p", "v", "m"), GRID)
@pytest.mark.parametrize("scheduler", ["gpipe", "1f1b"])
def test_bubble_messages_and_work_are_those_of_the_formulas(
    scheduler: str, p: int, v: int, m: int, forward: int, backward: int
) -> None:
    """For all these schedulers the bubble is (p - 1) t / v, where t is the time of one micro batch on a rank."""
    t = run(scheduler, p, v, m, flat(p * v, forward, backward))
    chunk = forward + backward
    assert t.busy == (m * v * chunk,) * p
    assert t.makespan - m * v * chunk == (p - 1) * chunk
    assert bubble_ratio(t) == (p - 1) / (v * m)
    assert t.bubble == (p - 1) / (v * m + p - 1)
    assert t.messages == (2 * m * (p * v - 1) if p > 1 else 0)


@pytest.mark.parametrize(("p", "v", "m"), GRID)
def test_gpipe_and_looped_bfs_hold_every_micro_batch(p: int, v: int, m: int) -> None:
    t = run("gpipe", p, v, m, flat(p * v))
    assert (t.peak, t.in_flight) == ((v * m,) * p, (m,) * p)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, v, m in GRID if v == 1])
def test_1f1b_holds_as_many_micro_batches_as_ranks_follow(p: int, m: int) -> None:
    t = run("1f1b", p, 1, m, flat(p))
    assert t.peak == t.in_flight == tuple(min(m, p - r) for r in range(p))


@pytest.mark.parametrize(("p", "v", "m"), [(p, v, m) for p, v, m in GRID if v > 1 and m > p])
def test_interleaved_1f1b_holds_its_warm_up_plus_one(p: int, v: int, m: int) -> None:
    t = run("1f1b", p, v, m, flat(p * v))
    first = p + m % p
    assert t.peak == tuple(min(v * m, 2 * (p - 1 - r) + (v - 1) * first + 1) for r in range(p))
    if m % p == 0:
        assert t.peak[0] / v == p + (p - 1) / v


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 2, 32)])
def test_less_memory_holds_one_micro_batch_a_rank_for_the_same_bubble_but_pays_for_transfers(
    p: int, v: int, m: int
) -> None:
    """Without latency, the peak is p and the bubble (p - 1) t / v.

    Interleaved 1F1B keeps more micro batches in flight, which hides transfers.
    """
    place = schedules.placement(p, v)
    t = simulate(schedules.build("1f1b", p, v, m, less_memory=True), place, flat(p * v))
    assert t.makespan - m * v * 3 == (p - 1) * 3
    assert t.peak == tuple(v * p - r for r in range(p))
    slow = [
        simulate(schedules.build("1f1b", p, v, m, less), place, flat(p * v, transfer=0.5)).makespan
        for less in (True, False)
    ]
    assert slow[0] > slow[1]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_a_split_backward_fills_the_bubble_with_weight_gradients(p: int, m: int) -> None:
    """ZB-H1 (arXiv 2401.10241): if W fits, the bubble is (p - 1)(tf + ti - tw).

    No rank needs more memory than 1F1B's first rank.
    """
    t = run("zero_bubble_h1", p, 1, m, flat(p))
    assert t.makespan - m * 3 == p - 1
    assert t.peak == t.in_flight == (p,) * p
    uneven = Cost((4,) * p, (9,) * p, (1,) * p, weight=(3,) * p)
    assert run("zero_bubble_h1", p, 1, m, uneven).makespan - m * 13 == pytest.approx((p - 1) * (4 + 6 - 3))


@pytest.mark.parametrize(("tf", "ti", "tw"), [(1, 1, 1), (2, 3, 2), (2, 2, 1)])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (4, 8), (8, 33)])
def test_a_v_waits_for_the_first_micro_batch_only_and_its_ranks_hold_the_same(
    p: int, m: int, tf: int, ti: int, tw: int
) -> None:
    """ZB-V: the bubble is (p - 1) times the longer of F and I of one chunk, and every rank holds p micro batches.

    There is no bubble if the optimizer does not wait.
    """
    cost = Cost((tf,) * 2 * p, (ti + tw,) * 2 * p, (1,) * 2 * p, weight=(tw,) * 2 * p)
    t = run("zero_bubble_v", p, 2, m, cost)
    assert t.makespan - 2 * m * (tf + ti + tw) == pytest.approx((p - 1) * max(tf, ti))
    assert t.peak == (2 * p,) * p
    assert t.messages == 2 * m * (2 * p - 2)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (4, 8), (8, 33)])
def test_dualpipe_v_has_the_bubble_of_zb_v_and_holds_one_chunk_more(p: int, m: int) -> None:
    t = run("dualpipe_v", p, 2, m, flat(2 * p))
    assert t.makespan - 2 * m * 3 == p - 1
    assert t.peak == (2 * p + 1,) * p
    assert t.messages == 2 * m * (2 * p - 2)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 9)])
def test_gpipe_waits_for_one_transfer_a_neighbor_each_way(p: int, m: int) -> None:
    assert run("gpipe", p, 1, m, flat(p, transfer=0.5)).makespan == (m + p - 1) * 3 + 2 * (p - 1) * 0.5


def test_chunks_of_one_rank_need_no_transfer() -> None:
    t = run("gpipe", 1, 3, 2, flat(3, transfer=100.0))
    assert (t.makespan, t.messages, t.bubble) == (18.0, 0, 0.0)


def test_the_slowest_stage_sets_the_pace() -> None:
    t = run("1f1b", 2, 1, 4, Cost((1, 3), (2, 6), (10, 7)))
    assert (t.makespan, t.busy, t.peak) == (39, (12, 36), (20, 7))
    assert [(e.start, e.end, str(e.action)) for e in t.events[:4]] == [
        (0, 1, "0F0"), (1, 2, "0F1"), (10, 12, "0B0"), (12, 13, "0F2"),
    ]  # fmt: skip


times = st.integers(1, 9)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, tuple[int, ...], Cost]:
    """Draw any schedule, with any stage costs."""
    scheduler, p = draw(st.sampled_from(list(schedules.RULES))), draw(st.integers(1, 5))
    rule = schedules.RULES[scheduler]
    v = 1 if rule.single or (rule.v and p == 1) else 2 if rule.v else draw(st.integers(1 + rule.several, 3))
    m = draw(st.integers(p * v if rule.full else p, 3 * p + 2))
    per_stage = st.tuples(*[times] * (p * v))
    cost = Cost(draw(per_stage), draw(per_stage), draw(per_stage), draw(st.integers(0, 4)))
    return schedules.build(scheduler, p, v, m), schedules.placement(p, v, rule.v and p > 1), cost


@settings(deadline=None)
@given(pipelines())
def test_everything_starts_as_soon_as_it_can_and_no_sooner(pipeline: tuple[Schedule, tuple[int, ...], Cost]) -> None:
    schedule, place, cost = pipeline
    t = simulate(schedule, place, cost)
    end = {result(e.action): e.end for e in t.events}
    for rank, row in enumerate(schedule):
        own = [e for e in t.events if e.rank == rank]
        assert tuple(e.action for e in own) == row
        free = [0.0, *(e.end for e in own)]
        for e, before in zip(own, free, strict=False):
            arrivals = [end[a] + cost.transfer * (place[a.stage] != rank) for a in inputs(e.action, len(place))]
            assert e.start == max([before, *arrivals])
            assert e.end - e.start == cost.time(e.action)
    assert t.makespan == max(end.values())


def result(a: Action) -> Action:
    """Return B for I, because an action that waits for a backward only needs its I."""
    return a._replace(kind="B") if a.kind == "I" else a


def inputs(a: Action, stages: int) -> list[Action]:
    if a.kind == "W":
        return [a._replace(kind="B")]
    if a.kind == "F":
        return [Action(a.stage - 1, "F", a.micro)] if a.stage > 0 else []
    return [Action(a.stage, "F", a.micro)] + ([Action(a.stage + 1, "B", a.micro)] if a.stage < stages - 1 else [])


@settings(deadline=None)
@given(pipelines(), st.randoms())
def test_no_replay_holds_more_than_was_simulated(
    pipeline: tuple[Schedule, tuple[int, ...], Cost], random: Random
) -> None:
    """Law 4: ranks run in any order that their inputs allow.

    The memory of a rank is counted from the activations that it holds.
    """
    schedule, place, cost = pipeline
    t = simulate(schedule, place, cost)
    hands: list[set[tuple[int, int]]] = [set() for _ in schedule]
    done: set[Action] = set()
    at = [0] * len(schedule)
    while any(at[r] < len(row) for r, row in enumerate(schedule)):
        ready = [
            r for r, row in enumerate(schedule)
            if at[r] < len(row) and done.issuperset(inputs(row[at[r]], len(place)))
        ]  # fmt: skip
        rank = random.choice(ready)
        a = schedule[rank][at[rank]]
        at[rank] += 1
        done.add(result(a))
        hands[rank].add((a.stage, a.micro))
        assert sum(cost.activation[stage] for stage, _ in hands[rank]) <= t.peak[rank]
        assert len({micro for _, micro in hands[rank]}) <= t.in_flight[rank]
        if a.kind in ("B", "W"):
            hands[rank].remove((a.stage, a.micro))


DEADLOCKS = {
    "backward first": (
        ((Action(0, "B", 0), Action(0, "F", 0)), (Action(1, "F", 0), Action(1, "B", 0))),
        "the schedule deadlocks: rank 0 at 0B0 waits for 0F0; rank 1 at 1F0 waits for 0F0",
    ),
    "crossed": (
        (
            (Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)),
            (Action(1, "F", 0), Action(1, "F", 1), Action(1, "I", 0), Action(1, "W", 0), Action(1, "B", 1)),
        ),
        "the schedule deadlocks: rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1",
    ),
    "forgotten": (
        ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0),)),
        "the schedule deadlocks: rank 0 at 0B0 waits for 1B0, which no rank runs",
    ),
}


@pytest.mark.parametrize("case", DEADLOCKS)
def test_a_deadlock_names_what_each_rank_is_stuck_at(case: str) -> None:
    schedule, message = DEADLOCKS[case]
    with pytest.raises(Deadlock) as caught:
        simulate(schedule, (0, 1), flat(2))
    assert str(caught.value) == message


def test_ranks_that_do_nothing_have_no_bubble() -> None:
    t = simulate(((), ()), (0, 1), flat(2))
    assert (t.makespan, t.busy, t.bubble, t.messages) == (0.0, (0, 0), 0.0, 0)


def test_a_pipeline_of_a_whole_cluster_is_simulated() -> None:
    t = run("1f1b", 64, 1, 512, flat(64))
    assert (len(t.events), t.makespan) == (2 * 64 * 512, (512 + 63) * 3)


@settings(deadline=None)
@given(pipelines())
def test_events_of_a_rank_do_not_overlap(pipeline: tuple[Schedule, tuple[int, ...], Cost]) -> None:
    for a, b in pairwise(simulate(*pipeline).events):
        assert a.rank < b.rank or (a.rank == b.rank and a.end <= b.start)


@pytest.mark.parametrize(("p", "v", "m"), GRID)
def test_a_message_is_on_its_way_from_an_action_to_the_earliest_start_of_the_next(p: int, v: int, m: int) -> None:
    t = run("1f1b", p, v, m, flat(p * v, transfer=0.25))
    at = {e.action: e for e in t.events}
    assert len(t.sent) == t.messages
    for e in t.sent:
        a = e.action
        next_one = at[a._replace(stage=a.stage + (1 if a.kind == "F" else -1))]
        assert (e.rank, e.start, e.end) == (at[a].rank, at[a].end, at[a].end + 0.25)
        assert next_one.rank != e.rank
        assert next_one.start >= e.end
