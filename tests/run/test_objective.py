"""Complete runs with a user's own loss and metrics."""

from __future__ import annotations

import csv

import pytest

from launcher.__main__ import main
from tests.run.launching import TINY, metrics, run, shape, status, tensors

OWN = ("loss={_target_: tests.objective.own.Weighted}", "security.allow=[tests]")
MEASURED = ("metrics=[accuracy,{name: top_k, k: 3},{_target_: tests.objective.own.Holes}]", "train.eval_every=2")
NAMES = ("accuracy", "top_3", "holes")


def test_metrics_are_in_every_row_that_is_written_and_the_weights_are_those_without_them(tmp_path):
    asked = ("steps=[train,evaluate,save]", "train.log_every=2", "train.precision=fp64", "logger.csv=true", *OWN)
    found = run(tmp_path / "run", *asked, *MEASURED)
    rows = metrics(found)
    assert [row["step"] for row in rows] == [2, 2, 4, 4]
    for row in rows:
        kind = "" if "loss" in row else "val_"
        assert [row[f"{kind}{name}"] for name in NAMES[2:]] == [0.0]
        assert all(0 <= row[f"{kind}{name}"] <= 1 for name in NAMES)
    with (found / "metrics.csv").open() as table:
        assert {*NAMES, *(f"val_{n}" for n in NAMES)} <= {*next(csv.reader(table))}
    assert status(found)["metrics"]["val_accuracy"] == rows[-1]["val_accuracy"]

    # another layout has the same figures, and measuring changes nothing
    alone = run(tmp_path / "alone", *asked, *MEASURED, *shape())
    for row, other in zip(rows, metrics(alone), strict=True):
        keys = {"loss", "val_loss", *NAMES, *(f"val_{n}" for n in NAMES)} & row.keys()
        assert {k: row[k] for k in keys} == pytest.approx({k: other[k] for k in keys}, rel=1e-12)
    assert tensors(run(tmp_path / "without", *asked), 4) == tensors(found, 4)


def test_a_resume_with_another_loss_is_noted(tmp_path, capsys):
    before = run(tmp_path / "before", *shape(), steps=2)
    resume = f"checkpoint.resume={before}/checkpoints/step-000002"
    words = [*TINY, *shape(), resume, "train.steps=4", "show=plan"]
    assert main([*words, "loss.label_smoothing=0.1", "metrics=[accuracy]"]) == 0
    assert "loss.label_smoothing 0.0 -> 0.1: since step-000002" in capsys.readouterr().out
    assert main([*words, *OWN]) == 0
    assert "loss cross_entropy -> tests.objective.own.Weighted: since step-000002" in capsys.readouterr().out


def test_a_metric_that_is_nan_is_named_with_its_step_and_the_run_fails(tmp_path, capsys):
    nan = "metrics=[accuracy,{_target_: tests.objective.own.Holes, nan_from: 4}]"
    words = [*TINY, f"run_dir={tmp_path}/run", "train.steps=4", "train.log_every=3", nan, "security.allow=[tests]"]
    capsys.readouterr()
    assert main(words) == 1
    assert (
        "step 3: the metric holes is NaN (sum nan, count 128). Look at the metric, or at the data of this step"
        in capsys.readouterr().err
    )
    assert status(tmp_path / "run")["status"] == "failed"
