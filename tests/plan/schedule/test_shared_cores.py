"""Ranks that share cores: cases computed by hand, and laws that hold for every schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.schedule import schedules
from launcher.plan.schedule.shared_cores import Cores, simulate_shared
from launcher.plan.schedule.simulate import Cost, Deadlock, Timeline, simulate


def one_node(rows: int, copies: int = 1) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Place ``copies`` ranks of each pipeline rank on one node."""
    return (((0, copies),),) * rows


def cost(stages: int, transfer: float = 0.0) -> Cost:
    """A forward takes 1, a backward 2."""
    return Cost((1.0,) * stages, (2.0,) * stages, (1,) * stages, transfer)


def spans(t: Timeline) -> list[tuple[str, float, float]]:
    return [(str(e.action), round(e.start, 9), round(e.end, 9)) for e in t.events]


def test_two_ranks_on_one_core_by_hand() -> None:
    """The schedule is GPipe with two micro batches; two actions at once take twice as long.

    1F0 and 0F1 begin at 1 and end at 3; 1F1 is alone until 4, 1B0 until 6. Then 1B1 and 0B0 share the core from 6 to
    10, and 0B1 is alone.
    """
    found = simulate_shared(schedules.build("gpipe", 2, 1, 2), (0, 1), cost(2), Cores(1, one_node(2)))
    assert spans(found) == [
        ("0F0", 0, 1), ("0F1", 1, 3), ("0B0", 6, 10), ("0B1", 10, 12),
        ("1F0", 1, 3), ("1F1", 3, 4), ("1B0", 4, 6), ("1B1", 6, 10),
    ]  # fmt: skip
    assert found.makespan == pytest.approx(12)  # one core is never idle
    assert found.busy == pytest.approx((9, 9))


def test_copies_of_a_rank_are_at_work_with_it() -> None:
    """One stage on three ranks and two cores: every action takes 1.5 times as long."""
    found = simulate_shared(schedules.build("1f1b", 1, 1, 1), (0,), cost(1), Cores(2, one_node(1, 3)))
    assert spans(found) == [("0F0", 0, 1.5), ("0B0", 1.5, 4.5)]


def test_a_message_on_its_way_takes_no_core() -> None:
    """0F1 has the core alone for 0.5, while the message of 0F0 is sent; then 0F1 and 1F0 share it."""
    found = simulate_shared(schedules.build("gpipe", 2, 1, 2), (0, 1), cost(2, 0.5), Cores(1, one_node(2)))
    assert spans(found)[:2] == [("0F0", 0, 1), ("0F1", 1, 2.5)]
    assert spans(found)[4] == ("1F0", 1.5, 3)


def test_nodes_have_cores_of_their_own() -> None:
    apart = Cores(1, (((0, 1),), ((1, 1),)))
    rows = schedules.build("1f1b", 2, 1, 4)
    assert simulate_shared(rows, (0, 1), cost(2), apart) == simulate(rows, (0, 1), cost(2))


def test_a_core_is_faster_while_others_rest() -> None:
    """One micro batch passes two stages: one of two cores is always idle, so the other is 1.5 times as fast."""
    found = simulate_shared(schedules.build("1f1b", 2, 1, 1), (0, 1), cost(2), Cores(2, one_node(2), alone=1.5))
    assert [e.end - e.start for e in found.events] == pytest.approx([2 / 3, 4 / 3] * 2)
    assert found.makespan == pytest.approx(4)


def test_with_all_cores_at_work_none_is_faster() -> None:
    both = Cores(2, one_node(1, 2), alone=1.5)
    found = simulate_shared(schedules.build("1f1b", 1, 1, 3), (0,), cost(1), both)
    assert (found.makespan, both.crowd) == (pytest.approx(9), 1)
    assert Cores(2, one_node(1), alone=1.5).crowd == pytest.approx(2 / 3)


def test_the_slowest_node_of_a_row_holds_up_the_others() -> None:
    """Two of three ranks share the one core of the first node."""
    split = Cores(1, (((0, 2), (1, 1)),))
    found = simulate_shared(schedules.build("1f1b", 1, 1, 1), (0,), cost(1), split)
    assert found.makespan == pytest.approx(6)


def test_ranks_that_wait_for_each_other_are_found_here_too() -> None:
    rows = tuple(tuple(reversed(row)) for row in schedules.build("1f1b", 2, 1, 2))
    with pytest.raises(Deadlock):
        simulate_shared(rows, (0, 1), cost(2), Cores(1, one_node(2)))


@given(
    kind=st.sampled_from(["gpipe", "1f1b", "zero_bubble_h1"]),
    ranks=st.integers(1, 4),
    micros=st.integers(1, 6),
    times=st.lists(st.floats(0.1, 5), min_size=8, max_size=8),
    transfer=st.sampled_from([0.0, 0.3]),
    cores=st.integers(1, 9),
    copies=st.integers(1, 2),
    quick=st.sampled_from([1.0, 1.4]),
)
def test_laws(
    kind: str,
    ranks: int,
    micros: int,
    times: list[float],
    transfer: float,
    cores: int,
    copies: int,
    quick: float,
) -> None:
    """A step on shared cores takes at least as long as with a core per rank, and as its work over the cores.

    It takes the same time if there are enough cores. If a core that works alone is ``quick`` times as fast, no action
    is shorter than with cores that are always that fast.
    """
    rows, place = schedules.build(kind, ranks, 1, micros), tuple(range(ranks))
    costs = Cost(tuple(times[:ranks]), tuple(times[4 : 4 + ranks]), (1,) * ranks, transfer)
    alone = simulate(rows, place, costs)
    found = simulate_shared(rows, place, costs, Cores(cores, one_node(ranks, copies)))
    work = copies * sum(alone.busy)
    assert found.makespan >= alone.makespan * (1 - 1e-9)
    assert found.makespan >= work / cores * (1 - 1e-9)
    if cores >= ranks * copies:
        assert found == alone
    assert [e.action for e in found.events] == [e.action for e in alone.events]
    faster = simulate_shared(rows, place, costs, Cores(cores, one_node(ranks, copies), quick))
    for e, slower in zip(faster.events, found.events, strict=True):
        assert (e.end - e.start) * quick >= (slower.end - slower.start) / max(1, ranks * copies / cores) * (1 - 1e-9)
    assert alone.makespan / quick * (1 - 1e-9) <= faster.makespan
    for e, own in zip(found.events, alone.events, strict=True):
        assert e.end - e.start >= (own.end - own.start) * (1 - 1e-9)
        assert e.end - e.start <= (own.end - own.start) * max(1, ranks * copies / cores) * (1 + 1e-9)


@given(ranks=st.integers(2, 4), micros=st.integers(1, 6), transfer=st.sampled_from([0.0, 0.3]))
def test_rows_that_nothing_slows_are_those_of_the_plain_simulation(ranks: int, micros: int, transfer: float) -> None:
    """One more rank shares its core but has no actions, so the simulation with a clock must give the same times."""
    rows = (*schedules.build("1f1b", ranks, 1, micros), ())
    crowded = Cores(1, (*(((n, 1),) for n in range(ranks)), ((9, 2),)))
    found = simulate_shared(rows, tuple(range(ranks)), cost(ranks, transfer), crowded)
    plain = simulate(rows, tuple(range(ranks)), cost(ranks, transfer))
    for e, own in zip(found.events, plain.events, strict=True):
        assert (e.start, e.end) == pytest.approx((own.start, own.end))
