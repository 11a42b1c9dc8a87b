"""Steps made from known constants give these constants back, never far beyond the data, and a file that says so."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log
from pathlib import Path

import pytest

from launcher.extras.calibration.refit import (
    CANDIDATES,
    FAR,
    MOST_CONSTANTS,
    MeasuredStep,
    changed,
    cluster_text,
    error,
    refit,
    value,
)
from launcher.job.compose import compose
from launcher.job.schema.cluster import Cluster
from launcher.plan.time.step_work import StepWork
from launcher.planner.plan_job import plan_job
from tests.plan.time.two_cores import TWO_CORES

MODEL = (
    "recipe=lm_single", "data=random_tokens", "data.vocab_size=1024", "data.seq_len=128", "model.dim=256",
    "model.layers=8", "model.heads=4", "model.tied=false", "train.batch_size=16", "train.precision=fp32",
    "steps=[train]",
)  # fmt: skip
LAYOUTS: dict[str, tuple[str, ...]] = {
    "alone": ("launch.nproc=1",),
    "replicas": ("launch.nproc=2",),
    "tp": ("launch.nproc=2", "parallel.grid.tp=2", "operators=megatron"),
    "stages": ("launch.nproc=2", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batch_num=4"),
    "shards": ("launch.nproc=2", "parallel.hsdp={shard_size: 2, threshold: 1}"),
    "more micro batches": ("launch.nproc=2", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batch_num=8"),
}  # fmt: skip
HERE = compose([*MODEL, *TWO_CORES]).job.cluster


@cache
def work(layout: str) -> StepWork:
    return plan_job(compose([*MODEL, *TWO_CORES, *LAYOUTS[layout]]).job).estimate.work


def measured(truth: Mapping[str, float], *layouts: str, cluster: Cluster = HERE) -> list[MeasuredStep]:
    """Return what the steps would take with these constants."""
    steps = [MeasuredStep(work(name), cluster, "fp32", 2, 1.0) for name in layouts]
    return [MeasuredStep(s.work, cluster, "fp32", 2, s.on(changed(cluster, truth))) for s in steps]


@pytest.mark.parametrize("layouts", [("replicas", "tp"), tuple(LAYOUTS)[1:]], ids=["two", "five"])
@pytest.mark.parametrize(
    ("truth", "within"),
    [
        ({"efficiency": 0.5}, 0.1),
        ({"efficiency": 0.5, "overheads.step_ms": 20.0}, 0.15),
        ({"efficiency": 0.3, "memory_gb_per_s": 10.0, "overheads.slot_ms": 2.0}, 0.25),
    ],
    ids=["products", "overheads too", "all of it"],
)
def test_the_refit_recovers_the_constants_that_made_the_measurements(
    layouts: tuple[str, ...], truth: dict[str, float], within: float
) -> None:
    steps = measured(truth, *layouts)
    found = refit(steps)
    assert found.fitted["efficiency"][0] == 0.96
    assert found.cluster.efficiency == pytest.approx(truth["efficiency"], rel=within)
    assert error(found.before, steps) > 0.3
    assert error(found.after, steps) < 0.03
    assert found.after == tuple(step.on(found.cluster) for step in steps)
    assert changed(found.cluster, {key: old for key, (old, _) in found.fitted.items()}) == HERE


def test_a_constant_on_which_no_step_depends_is_not_changed() -> None:
    """One rank sends nothing and has no pipeline."""
    found = refit(measured({"efficiency": 0.5}, "alone"))
    assert found.fitted.keys() <= {"efficiency", "memory_gb_per_s", "kernels.launch_us", "overheads.step_ms"}
    assert found.cluster.links == HERE.links
    assert found.cluster.overheads.slot_ms == HERE.overheads.slot_ms


def test_a_constant_of_zero_stays_zero() -> None:
    none = changed(HERE, {"overheads.step_ms": 0.0})
    found = refit(measured({"overheads.step_ms": 50.0}, "replicas", "tp", cluster=none))
    assert found.cluster.overheads.step_ms == 0.0


def test_steps_that_take_the_predicted_time_change_no_constant() -> None:
    found = refit(measured({}, "replicas", "stages"))
    assert found.fitted == {}
    assert found.cluster == HERE


def test_no_more_than_a_few_are_fitted() -> None:
    slow = {key: value(HERE, key) * (2 if key.endswith(("_us", "_ms")) else 0.5) for key in CANDIDATES}
    found = refit(measured(slow, *LAYOUTS))
    assert len(found.fitted) <= MOST_CONSTANTS


def test_a_few_measurements_change_constants_only_a_little() -> None:
    """One layout takes ten times as long: alone, and beside others that take the predicted time."""
    (alone,) = measured({}, "replicas")
    slow = MeasuredStep(alone.work, HERE, "fp32", 2, 10 * alone.seconds)
    for old, new in refit([slow]).fitted.values():
        assert abs(log(new / old)) <= log(FAR) + 0.005  # constants have three digits
    beside = measured({}, "tp", "stages", "shards")
    for old, new in refit([slow, *beside]).fitted.values():
        assert abs(log(new / old)) < log(1.05)


def test_the_file_is_read_as_the_cluster_and_predicts_the_refitted_seconds(tmp_path: Path) -> None:
    steps = measured({"efficiency": 0.5, "links.inside.latency_us": 1500.0}, "replicas", "tp", "stages")
    found = refit(steps)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mine.yaml").write_text(cluster_text(found.cluster, ["Refitted."], {}))
    words = [*MODEL, *LAYOUTS["stages"], "cluster=mine"]
    job = compose(words, config_dir=tmp_path).job
    assert job.cluster == found.cluster
    step = plan_job(job).estimate.step
    assert step is not None
    assert step.seconds == found.after[2]


@pytest.mark.parametrize("name", ["here", "h100_sxm", "a100_80g", "ascend_910b", "b200"])
def test_any_cluster_is_written_as_it_is_read(tmp_path: Path, name: str) -> None:
    told = compose([f"cluster={name}"]).job.cluster.model_copy(update={"name": "mine: a, b"})
    odd = changed(told, {"overheads.near_limit": 1e-5, "links.between.gb_per_s": 100 / 3})
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mine.yaml").write_text(cluster_text(odd, [], {"efficiency": "of its own"}))
    assert compose(["cluster=mine"], config_dir=tmp_path).job.cluster == odd
    assert "  # of its own\n" in (tmp_path / "cluster/mine.yaml").read_text()
