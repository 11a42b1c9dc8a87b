"""Collectives beside the actions of a step: computed by hand, and equal to the terms of the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.job.schema.cluster import Cluster
from launcher.plan.schedule import schedules
from launcher.plan.schedule.lanes import Part, Stretch
from launcher.plan.time.prediction import Prediction, predict
from launcher.plan.time.speeds import speeds_of
from launcher.plan.time.step_work import ActionWork
from launcher.plan.values.grid import Grid
from launcher.planner.plan_job import plan_job
from tests.parity import job
from tests.plan.time.test_prediction import (
    FAST,
    MEGATRON,
    RANK,
    SECOND,
    STAGE,
    TWO,
    step,
    work,
)

TP = (("all_gather", 2 * 10**10, 1),)
"""A collective of 0.1 s over two ranks."""
SENDING = replace(STAGE, forward=ActionWork(SECOND, TP), backward=ActionWork(TWO, TP))
TWO_TP = Grid.of(pp=1, dp_replicate=1, dp_shard=1, tp=2)
HALVES = Grid.of(pp=1, dp_replicate=1, dp_shard=2, tp=1)


def lane(found: Prediction, name: str) -> tuple[Stretch, ...]:
    (one,) = (lane for lane in found.lanes if lane.name == name)
    return one.stretches


def term(found: Prediction, name: str) -> float:
    return next(t.seconds for t in found.terms if t.name == name)


def test_where_nothing_is_sent_there_is_no_lane() -> None:
    assert step(work(2, 2)).lanes == ()
    sent = replace(RANK, share=(("all_gather", 10**10, 1),), tied=(("all_reduce", 10**10, 1),))
    assert step(work(1, 2, ranks=(sent,), stages=(SENDING,))).lanes == ()  # there is no other rank to send to


def test_collectives_over_tp_lie_at_the_end_of_the_action_that_waits_for_them() -> None:
    found = lane(step(work(1, 2, grid=TWO_TP, stages=(SENDING,))), "tp")
    assert [(s.rank, round(s.start, 9), round(s.end, 9), s.name) for s in found] == [
        (0, 1.0, 1.1, "0F0: collectives over tp"), (0, 3.1, 3.2, "0B0: collectives over tp"),
        (0, 4.2, 4.3, "0F1: collectives over tp"), (0, 6.3, 6.4, "0B1: collectives over tp"),
    ]  # fmt: skip


def test_of_a_backward_in_halves_the_first_waits() -> None:
    """The second of the two products is deferred: it takes a second and sends nothing."""
    stage = replace(SENDING, late=SECOND)
    grid = Grid.of(pp=2, dp_replicate=1, dp_shard=1, tp=2)
    order = schedules.build("zero_bubble_h1", 2, 1, 2)
    found = step(work(2, 2, grid=grid, stages=(stage, stage), schedule=order))
    took = {s.name[:3]: round(s.seconds, 9) for s in lane(found, "tp")}
    assert (took["0F0"], took["0I0"]) == (0.1, 0.1)
    assert "0W0" not in took
    lasted = {str(e.action): round(e.end - e.start, 9) for e in found.timeline.events}
    assert (lasted["0I0"], lasted["0W0"]) == (1.1, 1.0)


def test_weights_and_gradients_end_with_what_is_waited_for() -> None:
    """The step waits for a quarter of 0.4 s, after 3 s of work."""
    sent = replace(RANK, share=(("all_gather", 2 * 10**10, 1), ("reduce_scatter", 2 * 10**10, 3)))
    found = step(work(1, 1, grid=HALVES, ranks=(sent,)), exposed=0.25)
    (one,) = lane(found, "data-parallel")
    assert (one.rank, one.start, one.end) == (0, pytest.approx(2.7), pytest.approx(3.1))
    assert one.parts == (
        Part("all_gather", 1, 2 * 10**10, pytest.approx(0.1)),
        Part("reduce_scatter", 3, 6 * 10**10, pytest.approx(0.3)),
    )


def test_unsharded_gradients_and_ties_are_separate_parts_of_a_lane() -> None:
    sums = replace(RANK, same=(("all_reduce", 10**10, 1), ("all_reduce", 10**9, 10)), tied=(("all_reduce", 10**9, 1),))
    found = step(work(2, 1, grid=Grid.of(pp=2, dp_replicate=2, dp_shard=1, tp=1), ranks=(sums, RANK)))
    (one,) = lane(found, "data-parallel")
    assert [(p.kind, p.count, p.nbytes, round(p.seconds, 9)) for p in one.parts] == [
        ("all_reduce", 11, 2 * 10**10, 0.2), ("all_reduce of tied weights", 1, 10**9, 0.01),
    ]  # fmt: skip
    assert one.end - one.start == pytest.approx(0.21)


def test_more_than_computation_hides_begins_with_the_step() -> None:
    sent = replace(RANK, same=(("all_reduce", 10**12, 1),))
    grid = Grid.of(pp=1, dp_replicate=2, dp_shard=1, tp=1)
    (one,) = lane(step(work(1, 1, grid=grid, ranks=(sent,)), exposed_sums=0.25), "data-parallel")
    assert (one.start, one.end) == (pytest.approx(0), pytest.approx(10))


def test_a_wait_longer_than_the_collectives_is_drawn_as_long() -> None:
    sent = replace(RANK, share=(("all_gather", 2 * 10**10, 1),))
    (one,) = lane(step(work(1, 1, grid=HALVES, ranks=(sent,)), exposed=3), "data-parallel")
    assert (one.start, one.end) == (pytest.approx(3), pytest.approx(3.3))


def test_all_reduces_hidden_on_shared_cores_do_not_begin_before_the_step() -> None:
    """Two copies share a core: 3 s of work take 6 s, which hide 6 s of the 10 s of all-reduces."""
    sent = replace(RANK, same=(("all_reduce", 10**12, 1),))
    grid = Grid.of(pp=1, dp_replicate=2, dp_shard=1, tp=1)
    one_core = speeds_of(Cluster.model_validate(FAST | {"cores_per_node": 1, "overheads": {"exposed_sums": 0}}), "fp32")
    assert one_core is not None
    (one,) = lane(predict(work(1, 1, grid=grid, ranks=(sent,)), one_core), "data-parallel")
    assert (one.start, one.end) == (0.0, pytest.approx(6 + 10 - 6))
    assert one.parts == (Part("all_reduce", 1, 10**12, pytest.approx(10)),)


LEVEL = {"shard_size": 2, "threshold": 0}
OVER_TP: dict[str, Any] = {"parallel__grid": {"tp": 2}, "parallel__operators": MEGATRON}
BOTH, WEIGHTS = {"tp", "data-parallel"}, {"data-parallel"}
LAYOUTS: dict[str, tuple[set[str], dict[str, Any]]] = {
    "tp": ({"tp"}, OVER_TP | {"launch__nproc": 2}),
    "tp and copies": (BOTH, OVER_TP | {"launch__nproc": 4}),
    "tp and stages that share a table": (
        BOTH, OVER_TP | {"launch__nproc": 4, "parallel__pipeline": {"stages": 2, "micro_batch_num": 4}},
    ),
    "split backwards": (
        BOTH, OVER_TP | {
            "launch__nproc": 4,
            "parallel__pipeline": {"stages": 2, "micro_batch_num": 4, "scheduler": "zero_bubble_h1"},
        },
    ),
    "pieces of a sequence": (
        BOTH, OVER_TP | {
            "launch__nproc": 4,
            "parallel__pipeline": {"stages": 2, "micro_batch_num": 2, "scheduler": "seqpipe", "seq_chunks": 2},
        },
    ),
    "interleaved, level2": (
        WEIGHTS, {
            "launch__nproc": 4, "parallel__hsdp": LEVEL | {"optimizer_level": "level2"},
            "parallel__pipeline": {"stages": 2, "micro_batch_num": 4, "interleave": True},
        },
    ),
    "level1": (WEIGHTS, {"parallel__hsdp": LEVEL | {"optimizer_level": "level1"}, "launch__nproc": 4}),
    "level3": (WEIGHTS, {"parallel__hsdp": LEVEL | {"optimizer_level": "level3"}, "launch__nproc": 2}),
    "alone": (set(), {}),
}  # fmt: skip


@pytest.mark.parametrize("cores", [None, 2], ids=["devices", "cores"])
@pytest.mark.parametrize(("there", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_lanes_say_what_the_terms_of_the_step_say(there: set[str], changes: dict[str, Any], cores: int | None) -> None:
    found = plan_job(job(cluster=FAST | {"cores_per_node": cores}, **changes)).estimate.step
    assert found is not None
    lanes, timeline = {one.name: one.stretches for one in found.lanes}, found.timeline
    assert lanes.keys() == there

    # over tp: within the actions, in their order, and on the rank with most to do as much as the term
    events = {str(e.action): e for e in timeline.events}
    for s in lanes.get("tp", ()):
        within = events[s.name.partition(":")[0]]
        assert s.rank == within.rank
        assert within.start <= s.start < s.end == within.end
    most = max(range(len(timeline.busy)), key=lambda pp: timeline.busy[pp])
    waited = sum(s.seconds for s in lanes.get("tp", ()) if s.rank == most)
    assert waited == pytest.approx(term(found, "collectives over tp"))

    # weights and gradients: one lane per rank; the last ends when no rank waits any more
    weights = lanes.get("data-parallel", ())
    assert len({s.rank for s in weights}) == len(weights)
    ends = timeline.makespan + term(found, "gradients and weights on the network")
    assert max((s.end for s in weights), default=ends) == pytest.approx(ends)
    for s in weights:
        assert 0 <= s.start < s.end <= ends + 1e-12
        assert s.start == 0 or s.seconds == pytest.approx(sum(p.seconds for p in s.parts))
