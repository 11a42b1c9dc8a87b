from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.job.schema.parallel import Scheduler
from launcher.plan.schedule import schedules
from launcher.plan.schedule.schedules import Action, Schedule
from launcher.plan.schedule.simulate import Cost, simulate

shapes = st.integers(1, 8).flatmap(lambda p: st.tuples(st.just(p), st.integers(1, 4), st.integers(p, 4 * p + 3)))
"""(ranks, chunks, micros)"""


def lines(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule]


def parsed(*rows: str) -> Schedule:
    return tuple(tuple(Action(int(a[0]), a[1], int(a[2:])) for a in row.split()) for row in rows)  # type: ignore[arg-type]


def test_an_action_prints_as_torch_writes_it() -> None:
    assert str(Action(3, "F", 0)) == "3F0"


ORDERS = {
    ("zero_bubble_h1", 2, 1, 3): ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
    ("zero_bubble_v", 2, 2, 3): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ],
    ("dualpipe_v", 2, 2, 4): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ],
    ("gpipe", 2, 1, 3): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
    ("gpipe", 2, 2, 2): ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"],
    ("1f1b", 1, 1, 2): ["0F0 0B0 0F1 0B1"],
    ("1f1b", 2, 1, 3): ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"],
    ("1f1b", 3, 1, 3): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2"],
    ("1f1b", 2, 2, 4): [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
    ("1f1b", 2, 2, 3): [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ],
}


@pytest.mark.parametrize("shape", ORDERS, ids=str)
def test_orders_of_small_pipelines(shape: tuple[str, int, int, int]) -> None:
    assert lines(schedules.build(*shape)) == ORDERS[shape]


def test_evaluation_goes_forward_in_groups_as_large_as_the_pipeline() -> None:
    assert lines(schedules.forward_only((0, 1, 0, 1), 4)) == [
        "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3",
        "1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3",
    ]
    assert lines(schedules.forward_only((0, 1, 1, 0), 2)) == ["0F0 0F1 3F0 3F1", "1F0 1F1 2F0 2F1"]


@pytest.mark.parametrize("scheduler", list(schedules.RULES))
@settings(deadline=None)
@given(shapes)
def test_every_action_runs_once_and_nothing_deadlocks(scheduler: str, shape: tuple[int, int, int]) -> None:
    shape = fitted(scheduler, *shape)
    ranks, chunks, micros = shape
    schedule, place = schedules.build(scheduler, *shape), placed(scheduler, ranks, chunks)
    assert schedules.validate(schedule, place, micros) == []
    ran = simulate(schedule, place, flat(ranks * chunks))
    assert sorted(e.action for e in ran.events) == sorted(a for row in schedule for a in row)


@settings(deadline=None)
@given(shapes)
def test_evaluation_runs_every_forward_once_and_never_deadlocks(shape: tuple[int, int, int]) -> None:
    ranks, chunks, micros = shape
    for v in (False, True):
        place = schedules.placement(ranks, chunks, v)
        ran = simulate(schedules.forward_only(place, micros), place, flat(ranks * chunks))
    wanted = [Action(stage, "F", m) for stage in range(ranks * chunks) for m in range(micros)]
    assert sorted(e.action for e in ran.events) == wanted


@pytest.mark.parametrize("micros", [1, 2, 3])
@pytest.mark.parametrize("scheduler", list(schedules.RULES))
def test_too_few_micro_batches_only_leave_ranks_idle(scheduler: str, micros: int) -> None:
    ranks, chunks, micros = fitted(scheduler, 4, 2, micros)
    simulate(schedules.build(scheduler, ranks, chunks, micros), placed(scheduler, ranks, chunks), flat(ranks * chunks))


def fitted(scheduler: str, ranks: int, chunks: int, micros: int) -> tuple[int, int, int]:
    """Return the nearest shape that the scheduler supports."""
    rule = schedules.RULES[scheduler]
    chunks = 1 if ranks == 1 or rule.single else 2 if rule.v else max(chunks, 2) if rule.several else chunks
    return ranks, chunks, max(micros, ranks * chunks) if rule.full else micros


def placed(scheduler: str, ranks: int, chunks: int) -> tuple[int, ...]:
    return schedules.placement(ranks, chunks, schedules.RULES[scheduler].v and ranks > 1)


def flat(stages: int) -> Cost:
    return Cost((1,) * stages, (2,) * stages, (1,) * stages)


def test_every_scheduler_of_the_schema_has_a_rule_and_auto_takes_one() -> None:
    assert {*schedules.RULES, "auto"} == set(get_args(Scheduler))


COMPLAINTS = {
    "missing": (["0F0", "1F0 1B0"], ["stage 0, micro batch 0: runs F; it needs F and B, or F, I and W"]),
    "nothing": (["", "1F0 1B0"], ["stage 0, micro batch 0: runs nothing; it needs F and B, or F, I and W"]),
    "twice": (["0F0 0B0 0B0", "1F0 1B0"], ["stage 0, micro batch 0: runs B, B, F; it needs F and B, or F, I and W"]),
    "half split": (["0F0 0I0", "1F0 1B0"], ["stage 0, micro batch 0: runs F, I; it needs F and B, or F, I and W"]),
    "wrong rank": (["0F0 0B0 1B0", "1F0"], ["1B0 is on rank 0, but its stage is on rank 1"]),
    "no such stage": (["0F0 0B0 2F0", "1F0 1B0"], ["2F0 on rank 0: stage 2 does not exist; there are 2"]),
    "no such micro": (["0F0 0B0 0F1", "1F0 1B0"], ["0F1 on rank 0: micro batch 1 does not exist; there are 1"]),
}


@pytest.mark.parametrize("case", COMPLAINTS)
def test_a_wrong_schedule_is_told_what_is_wrong(case: str) -> None:
    rows, complaints = COMPLAINTS[case]
    assert schedules.validate(parsed(*rows), (0, 1), 1) == complaints


def test_pieces_go_forward_in_order_and_backward_in_reverse() -> None:
    assert schedules.validate(parsed("0F0 0F1 0B1 0B0"), (0,), 2, 2) == []
    assert schedules.validate(parsed("0F1 0F0 0B0 0B1"), (0,), 2, 2) == [
        "0F0 comes after 0F1, of the same micro batch", "0B1 comes after 0B0, of the same micro batch",
    ]  # fmt: skip


def test_a_split_backward_is_a_backward() -> None:
    assert schedules.validate(parsed("0F0 0I0 0W0", "1F0 1B0"), (0, 1), 1) == []
