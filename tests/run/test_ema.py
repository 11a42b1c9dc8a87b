"""Complete runs with a moving average of the weights: it is resumed, resharded, evaluated and exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher.__main__ import main
from launcher.checkpoint.export_one_file import read_full
from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.read import open_checkpoint, read_rank
from launcher.job.compose import compose
from launcher.plan.show.text import text
from launcher.planner.plan_job import plan_job
from launcher.runtime.training import loop
from launcher.runtime.training.session import Session
from tests.run.launching import BATCH, TINY, metrics, run, shape, status, tensors

EXPORTED = "steps.evaluate.of=exported"
DECAY, MEAN = 0.75, "optim.ema/weights."
EMA = (
    f"train.ema={{decay: {DECAY}, every: 2}}", "train.precision=fp64", "checkpoint.every=1", "checkpoint.keep=null",
    "schedule=constant", "optim.lr=0.01",
)  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of six steps on 2 stages x 2 shards, with a checkpoint after each step."""
    return run(tmp_path_factory.mktemp("straight") / "run", *EMA, steps=6)


def full_tensors(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Return every full tensor of a checkpoint."""
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step-{step:06d}")
    found = read_rank(checkpoint, single(checkpoint.strategy), 0)
    return {n: np.frombuffer(b.data, np.float64) for n, b in found.items() if b.dtype == "float64"}


def far(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[n] - b[n]).max() / np.abs(b[n]).max()) for n in a)


def test_the_moving_average_is_that_of_the_weights_of_all_steps(straight):
    weights = [{n: t for n, t in full_tensors(straight, k).items() if not n.startswith("optim.")} for k in range(1, 7)]
    means = {n.removeprefix(MEAN): t for n, t in full_tensors(straight, 6).items() if n.startswith(MEAN)}
    assert means.keys() == weights[0].keys()

    # one step later the average of step 1 is known: it is that of the weights at step 0
    first = {n.removeprefix(MEAN): t for n, t in full_tensors(straight, 1).items() if n.startswith(MEAN)}
    for name, mean in means.items():
        want = first[name]
        for k in (2, 4, 6):
            want = DECAY * want + (1 - DECAY) * weights[k - 1][name]
        assert np.abs(mean - want).max() <= 1e-12 * np.abs(want).max(), name


def test_a_run_that_stopped_goes_on_with_it_bit_for_bit_and_on_other_layouts_to_the_same_numbers(straight, tmp_path):
    resume = f"checkpoint.resume={straight}/checkpoints/step-000003"
    again = run(tmp_path / "same", *EMA, resume, steps=6)
    assert tensors(again, 6) == tensors(straight, 6)

    for name, layout in (("pipeline", {"pp": 2}), ("shards", {"shard": 4}), ("replicas", {"replicate": 2})):
        other = run(tmp_path / name, *EMA, resume, *shape(**layout), steps=6)
        assert far(full_tensors(other, 6), full_tensors(straight, 6)) <= 1e-10, name


def test_the_moving_average_starts_from_a_checkpoint_without_one_and_can_be_dropped(straight, tmp_path, capsys):
    off = run(tmp_path / "off", *EMA[1:], f"checkpoint.resume={straight}/checkpoints/step-000003", steps=4)
    assert "train.ema" in capsys.readouterr().out
    got, want = full_tensors(off, 4), full_tensors(straight, 4)
    assert far(got, {n: t for n, t in want.items() if not n.startswith(MEAN)}) == 0

    on = run(tmp_path / "on", *EMA, f"checkpoint.resume={off}/checkpoints/step-000004", steps=5)
    found = full_tensors(on, 5)
    assert all(np.array_equal(t, want[n.removeprefix(MEAN)]) for n, t in found.items() if n.startswith(MEAN))


def test_the_moving_average_is_evaluated_exported_and_transformed_unchanged(tmp_path):
    steps = "steps=[train,evaluate,save,transform,export]"
    weights = ("steps.evaluate.weights=ema", "steps.export.weights=ema", "steps.transform.nproc=2")
    done = run(tmp_path / "run", *EMA, steps, *weights, "steps.transform.shard_size=2", BATCH, "logger.csv=true")
    results = status(done)["metrics"]
    assert results["val_loss_ema"] == metrics(done)[-1]["val_loss_ema"] != results["loss"]
    assert "val_loss" not in results
    assert results["export_gap"] <= 1e-12 * results["val_loss_ema"]

    saved, exported = full_tensors(done, 4), read_full(done / "exports" / "model.safetensors")
    assert {*exported} >= {n.removeprefix(MEAN) for n in saved if n.startswith(MEAN)}
    for name, mean in saved.items():
        if name.startswith(MEAN):
            assert bytes(exported[name.removeprefix(MEAN)].data) == mean.tobytes(), name


def test_a_run_that_is_stopped_while_it_is_evaluated_saves_the_weights(straight, tmp_path, monkeypatch):
    def look(s: Session) -> None:
        if s.average is not None and s.average.swapped:
            loop.stop(s)

    monkeypatch.setattr(loop, "stop_if_requested", look)
    words = [*TINY, *EMA, "checkpoint.every=5", "steps=[train,evaluate]", "steps.evaluate.weights=ema", "train.steps=4"]
    assert main([*words, f"run_dir={tmp_path}/run"]) == 75
    assert far(full_tensors(tmp_path / "run", 4), full_tensors(straight, 4)) == 0


def test_both_losses_are_in_the_metrics(tmp_path):
    words = (*EMA, "train.eval_every=2", "train.eval_batches=1", BATCH, "steps=[train,evaluate,save]")
    done = run(tmp_path / "run", *words, "steps.evaluate.weights=ema")
    assert [sorted(row.keys() & {"val_loss", "val_loss_ema", "loss"}) for row in metrics(done)] == [
        ["loss"], ["loss"], ["val_loss"], ["loss"], ["loss"], ["val_loss_ema"],
    ]  # fmt: skip


def test_the_plan_counts_it_and_says_it():
    words = [*TINY, "train.steps=4"]
    without, plan = (plan_job(compose([*words, *more]).job) for more in ([], ["train.ema={}"]))
    for a, b in zip(without.estimate.memory, plan.estimate.memory, strict=True):
        assert (b.params, b.optimizer) == (a.params, a.optimizer // 2 * 3)
    why = "every step, on each rank's own pieces of the weights that are trained, in their dtype"
    assert f"train.ema.decay=0.999: applied, {why}" in " ".join(text(plan).split())


@pytest.mark.parametrize(
    ("typed", "key", "says", "cure"),
    [
        (
            ["steps=[train,evaluate]", "steps.evaluate.weights=ema"], "steps.evaluate.weights = ema",
            "without train.ema there is no moving average of the weights", "steps.evaluate.weights=ema train.ema={}",
        ),
        (
            ["steps=[train,save,export,evaluate]", "train.ema={}", "steps.evaluate.weights=ema", EXPORTED],
            "steps.evaluate.weights = ema",
            "with of=exported the step evaluates the weights that were written; to export the moving average, set "
            "weights=ema of the step export",
            "",
        ),
        (["train.ema.decay=1"], "train.ema.decay = 1", "should be less than 1", ""),
    ],
)  # fmt: skip
def test_impossible_settings_of_the_moving_average_are_refused(typed, key, says, cure, capsys):
    words = [*TINY, *shape(), "train.steps=4", "show=plan"]
    assert main([*words, *typed]) == 2
    said = capsys.readouterr().err
    assert f"  {key}: {says}\n" in said
    if cure:
        assert f"    try:    {cure}\n" in said
        more = cure.split()
        assert (
            main([*words, *[t for t in typed if t.partition("=")[0] not in {c.partition("=")[0] for c in more}], *more])
            == 0
        )


def test_an_export_of_a_checkpoint_without_one_is_refused(tmp_path, capsys):
    before = run(tmp_path / "before", *shape(), steps=1)
    path = f"{before}/checkpoints/step-000001"
    words = [*TINY, *shape(), "steps=[export]", f"steps.export.src={path}", "train.steps=4", f"run_dir={tmp_path}/run"]
    assert main([*words, "steps.export.weights=ema"]) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  steps.export.src: {path}: it has no moving average of its weights: it was trained without train.ema\n"
        f"    set by: steps.export.src={path} (command line)\n"
    )
