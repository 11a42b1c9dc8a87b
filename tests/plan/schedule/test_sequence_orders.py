"""MindSpore's sequence pipelines compared with their closed formulas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.plan.schedule import schedules
from launcher.plan.schedule.schedules import Schedule
from launcher.plan.schedule.simulate import Cost, Timeline, simulate

SEQ = ("seqpipe", "seqvpp", "seqsmartvpp")


def built(scheduler: str, p: int, v: int, m: int, s: int) -> Schedule:
    return schedules.build(scheduler, p, v, m, pieces=s)


def flat(stages: int, pieces: int, transfer: float = 0.0) -> Cost:
    n = stages * pieces
    return Cost((1,) * n, (2,) * n, (1,) * n, transfer, pieces=pieces)


def run(scheduler: str, p: int, v: int, m: int, s: int, transfer: float = 0.0) -> Timeline:
    return simulate(built(scheduler, p, v, m, s), schedules.placement(p, v), flat(p * v, s, transfer))


def peak(scheduler: str, p: int, v: int, s: int) -> int:
    """Return how many pieces of one chunk the first rank holds, if p divides their number."""
    if scheduler == "seqpipe":
        return p - 1 + s if v == 1 else 2 * (p - 1) + (v - 1) * p * s + s
    return (1 if scheduler == "seqsmartvpp" else 2) * (p - 1) + (v - 1) * p + s


SHAPES = [(n, p, v, s) for n in SEQ for p in (2, 4, 8) for v in (1, 2, 3) for s in (1, 2, 4)
          if n == "seqpipe" or (v > 1 and s <= p)]  # fmt: skip


@pytest.mark.parametrize(("scheduler", "p", "v", "s"), SHAPES)
def test_bubble_memory_and_messages_are_those_of_the_formulas(scheduler: str, p: int, v: int, s: int) -> None:
    """The bubble is (p - 1) t / (v s), where t is the time of one micro batch on a rank.

    There are s times as many messages.
    """
    m = 2 * p
    t = run(scheduler, p, v, m, s)
    assert t.makespan - m * v * s * 3 == (p - 1) * 3
    assert t.peak[0] == max(t.peak) == peak(scheduler, p, v, s)
    assert t.messages == 2 * m * s * (p * v - 1)


def test_a_lead_of_one_holds_less_and_waits_for_transfers() -> None:
    lead, one = run("seqvpp", 4, 2, 16, 4, transfer=0.2), run("seqsmartvpp", 4, 2, 16, 4, transfer=0.2)
    assert max(one.peak) < max(lead.peak)
    assert one.makespan > lead.makespan


def test_orders_of_a_small_pipeline() -> None:
    assert [" ".join(map(str, row)) for row in built("seqpipe", 2, 1, 2, 2)] == [
        "0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2", "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2",
    ]  # fmt: skip


@settings(deadline=None)
@given(st.data())
def test_any_shape_runs_every_piece_once_in_order_without_deadlock(data: st.DataObject) -> None:
    scheduler = data.draw(st.sampled_from(SEQ))
    several = scheduler != "seqpipe"
    p = data.draw(st.integers(2, 6))
    v, s = data.draw(st.integers(1 + several, 3)), data.draw(st.integers(1, p if several else 5))
    m = data.draw(st.integers(p, 3 * p + 2))
    made = built(scheduler, p, v, m, s)
    assert schedules.validate(made, schedules.placement(p, v), m * s, s) == []
    t = run(scheduler, p, v, m, s)
    assert len(t.events) == 2 * m * s * p * v
