"""A step that is named twice runs twice, each time with its own settings; a resume knows which of them has run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.job.compose import compose
from launcher.plan.resolve import sizes

PAGE = "steps=[train,save,load,broadcast,train]"
"""The steps of the script on MindSpore's page on parameter_broadcast."""


def test_each_has_a_name_of_its_own_in_order() -> None:
    assert [*compose([PAGE]).job.steps] == ["train", "save", "load", "broadcast", "train_2"]
    assert [*compose(["steps=[evaluate,train,evaluate]"]).job.steps] == ["evaluate", "train", "evaluate_2"]


def test_one_may_be_set_by_its_own_name_and_has_the_settings_of_the_first_else() -> None:
    words = ["steps=[evaluate,train,evaluate]", "steps.evaluate.batches=3"]
    kept = compose([*words, "steps.evaluate_2.weights=ema", "train.ema={}"]).job.steps
    assert [(kept[n].batches, kept[n].weights) for n in ("evaluate", "evaluate_2")] == [(3, "trained"), (3, "ema")]


def test_a_file_names_it_twice_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [lm_single, override /steps: [train, save, train], _self_]\n")
    assert [*compose([f"recipe={file}"]).job.steps] == ["train", "save", "train_2"]


@pytest.mark.parametrize(("limit", "steps"), [("null", 6), ("2", 4)])
def test_the_plan_counts_the_steps_of_all(limit: str, steps: int) -> None:
    got, wrong = sizes(compose([PAGE, "train.steps=3", f"debug.limit={limit}"]).job)
    assert got is not None
    assert not wrong
    assert got.steps == steps
    ends = f"until step {steps // 2} and {steps}; load continues at the step of its checkpoint"
    assert f"train.steps {steps // 2} -> {steps}: train runs 2 times, {ends}" in map(str, got.notes)
    got, _ = sizes(compose(["steps=[train,save,train]", "train.steps=3"]).job)
    assert got is not None
    assert "train.steps 3 -> 6: train runs 2 times, 3 steps each" in map(str, got.notes)


def test_a_cure_names_it_twice_too() -> None:
    _, wrong = sizes(compose(["steps=[train,export,train,export]", "train.steps=1"]).job)
    assert {p.cure for p in wrong} == {"'steps=[train,train,save,export,export]'"}


def test_a_second_train_step_continues_and_is_recorded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=mlp_autoparallel", PAGE, "train.steps=2", f"run_dir={tmp_path}/run"]
    assert main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run/status.json").read_text())["steps"][-1] == "train_2"
    assert main(words) == 0
    assert f"already done: {tmp_path}/run" in capsys.readouterr().out
