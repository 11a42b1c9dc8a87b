"""Weights & Biases, MLflow and Trackio together, each read back by its own package."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.extras.loggers import process
from launcher.extras.loggers.process import PACKAGES
from launcher.extras.loggers.sinks import figures, flat
from launcher.job.compose import compose
from launcher.job.schema.job import Job
from tests.run.launching import TINY, metrics, run, shape
from tests.run.read_back import read


def absent(name: str) -> str:
    return next((f"{package} is not installed" for package in PACKAGES[name] if find_spec(package) is None), "")


TRACKERS = ("wandb", "mlflow", "trackio")
THERE = [name for name in TRACKERS if not absent(name)]
each = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.skipif(bool(absent(n)), reason=absent(n) or "there")) for n in TRACKERS]
)
WORDS = (*shape(), "train.eval_every=2", "schedule=constant")


@pytest.fixture(scope="module")
def went_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three starts, with loggers from the second start on."""
    folder = tmp_path_factory.mktemp("runs") / "0001"
    run(folder, *WORDS, steps=2)
    loggers = f"logger=[plain,csv,{','.join(THERE)}]"
    run(folder, *WORDS, loggers, "logger.wait_s=300", steps=4)
    return run(folder, *WORDS, loggers, "logger.wait_s=300", steps=7)


def curves_of_metrics(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict(list)
    for row in metrics(folder):
        for key, value in figures(row).items():
            found[key].append((row["step"], value))
    return found


@each
def test_a_run_that_goes_on_is_one_run_with_all_its_curves(went_on: Path, name: str) -> None:
    (one,) = read(name, went_on)
    assert (one["project"], one["name"]) == ("lm_tied_pp2_hsdp2", "lm_tied_pp2_hsdp2-0001")
    assert {key: [tuple(p) for p in points] for key, points in one["scalars"].items()} == curves_of_metrics(went_on)
    assert [step for step, _ in one["scalars"]["train/loss"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, _ in one["scalars"]["val/loss"]] == [2, 4, 6]


@each
def test_config_and_plan_are_logged_once(went_on: Path, name: str) -> None:
    (one,) = read(name, went_on)
    config = yaml.safe_load((went_on / "config.yaml").read_text())
    if name != "trackio":  # trackio keeps the config of the last start
        config["train"]["steps"] = 4
    plan = one["plan"][0].removeprefix("```\n").removesuffix("\n```")
    assert len(one["plan"]) == 1
    assert plan.startswith("plan of lm_tied_pp2_hsdp2\n")
    if name == "mlflow":
        assert one["config"] == {key: str(value) for key, value in flat(config).items()}
        assert one["status"] == "FINISHED"
    else:
        assert {k: v for k, v in one["config"].items() if k[0] != "_"} == config


def started(folder: Path, name: str, before: int = 0) -> Any:
    job: Job = compose([*TINY, f"logger={name}"]).job
    (one,) = process.begun(job, folder, before)
    return one


def fed(folder: Path, name: str, *rows: tuple[int, float]) -> None:
    (folder / "config.yaml").write_text("name: x\n")
    (folder / "plan.txt").write_text("a plan\n")
    one = started(folder, name)
    for step, loss in rows:
        one.feed(json.dumps({"step": step, "steps": 9, "loss": loss}).encode(), step)
    process.end([one], "done", 300)


AGAIN = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (4, 40.0)]


@each
def test_steps_that_are_trained_again_are_logged_again(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fed(tmp_path, name, *AGAIN)
    (one,) = read(name, tmp_path)
    kept = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)] if name == "wandb" else AGAIN
    assert sorted(map(tuple, one["scalars"]["train/loss"])) == sorted(kept)
    assert caplog.messages == []


@each
def test_a_run_that_begins_anew_in_its_folder_is_another(tmp_path: Path, name: str) -> None:
    fed(tmp_path, name, (1, 1.0), (2, 2.0))
    fed(tmp_path, name, (1, 3.0))
    first, second = sorted(read(name, tmp_path), key=lambda one: len(one["scalars"]["train/loss"]), reverse=True)
    assert [tuple(p) for p in first["scalars"]["train/loss"]] == [(1, 1.0), (2, 2.0)]
    assert [tuple(p) for p in second["scalars"]["train/loss"]] == [(1, 3.0)]
    assert first["id"] != second["id"]


@each
def test_nan_and_infinite_values_stop_no_tracker(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    fed(tmp_path, name, (1, float("nan")), (2, float("inf")), (3, 3.0))
    (one,) = read(name, tmp_path)
    assert tuple(one["scalars"]["train/loss"][-1]) == (3, 3.0)
    assert caplog.messages == []
