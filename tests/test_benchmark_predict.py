"""Rows of a table of measurements are planned and predicted, or left empty with the reason; choices are rated."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.predict.__main__ import main
from benchmarks.predict.choice import Cell, cells
from benchmarks.predict.fit import fit
from benchmarks.predict.frameworks import FITTED, SET_BY_HAND
from benchmarks.predict.plans import Planned, planned
from benchmarks.predict.rows import UnusableRow, parsed, read
from benchmarks.predict.values import compared, seconds, step

TABLE = Path(__file__).parent / "golden/measured.csv"
ROWS = read(TABLE)


@pytest.fixture(scope="module")
def plans() -> dict[str, Planned | str]:
    return planned(ROWS)


def test_the_command_adds_what_is_predicted_or_why_it_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    with patch.object(sys, "argv", ["predict", str(TABLE), str(out), "--report", str(tmp_path), "--processes", "1"]):
        main()
    found = read(out)
    assert [{k: row[k] for k in ROWS[0]} for row in found] == ROWS
    assert [bool(row["predicted"]) for row in found] == [True, True, True, True, True, False]
    assert [row["why"] for row in found] == ["", "", "", "", "", "precision fp8: train.precision has none of these"]
    page = (tmp_path / "predict.md").read_text()
    assert "| vtrain_single | 2 |" in page
    assert "| precision fp8: train.precision has none of these | 1 |" in page
    assert (tmp_path / "results/predict_ultrascale.svg").read_text().count("<circle") == 1


def test_steps_and_bytes_are_about_what_was_measured(plans: dict[str, Planned | str]) -> None:
    """Each of these rows was within 18 % when this test was written; newly fitted constants may differ."""
    for c in compared(ROWS, plans, ("step_time", "tokens_per_s_per_gpu", "memory")):
        assert abs(c.error) < 0.25, (c.raw, c.predicted)


def test_a_run_that_was_out_of_memory_is_predicted_to_exceed_the_device(plans: dict[str, Planned | str]) -> None:
    (failed,) = compared(ROWS, plans, ("failed",))
    assert failed.predicted > 80


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cp": "2"}, "cp 2: only 1 can be asked for"),
        ({"layers": ""}, "the row does not say layers"),
        ({"n_gpus": "12"}, "tp x pp x dp are 4 of 12 devices"),
        ({"metric": "joules"}, "metric joules: neither time nor memory"),
    ],
)
def test_a_row_that_no_request_can_say_is_left_with_the_reason(change: dict[str, str], why: str) -> None:
    with pytest.raises(UnusableRow) as caught:
        parsed(ROWS[0] | change)
    assert str(caught.value) == why


def test_a_row_that_the_planner_refuses_keeps_the_refusal() -> None:
    raw = ROWS[0] | {"pp": "4", "vpp": "2", "tp": "1", "dp": "2", "n_gpus": "8", "global_batch": "4"}
    raw |= {"micro_batch": "1"}
    (why,) = planned([raw]).values()
    assert str(why).startswith("parallel.pipeline.micro_batch_num: 2: too few to fill 4 stages")


def test_a_pipeline_that_is_not_filled_is_predicted_from_one_that_is() -> None:
    """With one micro batch, one of two stages is always idle: two slots each way.

    With two micro batches there are three.
    """
    raw = ROWS[0] | {"pp": "2", "tp": "1", "dp": "2", "n_gpus": "4", "micro_batch": "1"}
    few, enough = planned([raw | {"global_batch": n} for n in ("2", "4")]).values()
    assert isinstance(few, Planned)
    assert isinstance(enough, Planned)
    assert (few.work.micros, few.work.samples, 2 * few.work.flops) == (1, 2, enough.work.flops)
    assert step(few).timeline.makespan == pytest.approx(step(enough).timeline.makespan * 2 / 3, rel=0.05)
    assert step(few).timeline.in_flight == (1, 1)
    assert few.work.ranks[0].memory < enough.work.ranks[0].memory
    assert 2 * few.kept == enough.kept


def test_at_most_five_constants_are_fitted_to_a_framework() -> None:
    assert {name: len(constants) <= 5 for name, constants in FITTED.items()} == dict.fromkeys(SET_BY_HAND, True)


def test_a_fit_finds_the_constants_that_made_the_times(plans: dict[str, Planned | str]) -> None:
    mine = [p for p in plans.values() if isinstance(p, Planned) and p.row.framework == "megatron_deepspeed"]
    true = {**SET_BY_HAND["megatron_deepspeed"], **FITTED["megatron_deepspeed"]}
    made = [(p, step(p).seconds) for p in mine]
    start = {"kernels.launch_us": 2 * true["kernels.launch_us"]}
    found = fit(made, start, {k: v for k, v in true.items() if k not in start})
    assert found["kernels.launch_us"] == pytest.approx(true["kernels.launch_us"], rel=0.05)


def test_choices_are_judged_by_what_was_measured(plans: dict[str, Planned | str]) -> None:
    """The pick is the layout that is predicted to be faster, whichever was measured faster."""
    one = next(c for c in compared(ROWS, plans, ("step_time",)))
    raw = one.raw | {"micro_batch": "8"}
    (other,) = compared([raw], planned([raw]), ("step_time",))
    assert other.predicted < one.predicted
    slow = replace(other, measured=4 * one.measured)
    (cell,) = cells([one, slow])
    assert cell == Cell(one.raw["model"], 4, layouts=2, first=0.75, five=0.0, hand=0.75)
    assert seconds(one) == one.measured
