"""``loss_repeated_mean``: a loss that is the same on all ranks of tp counts once, or once per rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import TOLERANCE, Outcome, alone, assert_parity, assert_same, job, under_layout

UP: dict[str, Any] = {"layers.*.mlp.up": {"weight": ["tp", None], "output": [None, None, None]}}
HEAD: dict[str, Any] = UP | {"head": {"weight": ["tp", None]}}
KEY = "parallel.loss_repeated_mean"


def of(operators: Any, **more: Any) -> Any:
    parallel = {"operators": operators, "grid": {"tp": 2}, "loss_repeated_mean": False} | more
    return job(model__tied=False, parallel=parallel)


@pytest.mark.parametrize("more", [{}, {"pipeline": {"stages": 2}}], ids=["tp2", "tp2 x 2 stages"])
def test_not_their_mean_makes_gradients_as_many_times_as_large(more: dict[str, Any]) -> None:
    j = of(UP, **more)
    plan, got = under_layout(j)
    want = alone(j, plan)
    twice = Outcome(want.loss, 2 * want.norm, {n: 2 * g for n, g in want.grads.items()}, want.buffers)
    assert_same(got, twice, TOLERANCE[plan.precision])
    said = [s for s in plan.settings if s.key == KEY]
    assert [(s.status, s.why) for s in said] == [
        ("applied", "the loss that 2 tensor-parallel ranks repeat counts 2 times: gradients are 2 times as large")
    ]


def test_a_loss_worked_out_together_is_repeated_by_nobody() -> None:
    plan, _ = assert_parity(of(HEAD))
    said = [s for s in plan.settings if s.key == KEY]
    assert [(s.status, s.why) for s in said] == [
        ("satisfied", "2 tensor-parallel ranks compute one loss together, and none repeats it")
    ]


def test_without_tensor_parallelism_there_is_nothing_to_repeat() -> None:
    plan, _ = assert_parity(job(parallel__loss_repeated_mean=False))
    said = [s for s in plan.settings if s.key == KEY]
    assert [(s.status, s.why) for s in said] == [("satisfied", "no rank repeats the loss of another")]
