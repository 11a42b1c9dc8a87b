"""Complete runs that a metric steers: they stop early, and keep the best checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint.export_one_file import read_full
from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.read import open_checkpoint, read_rank
from tests.run.launching import TINY, checkpoints, metrics, run, say, shape, status, steps

RISES = ("schedule=constant", "optim.lr=0.03", "train.eval_every=2", "train.precision=fp64")
"""The held-out loss falls, then rises, because the tokens are random."""
STOP = "train.early_stop={patience: 2}"
BEST = ("checkpoint.best=val_loss", "checkpoint.keep=1")


def validated(folder: Path) -> dict[int, float]:
    return {row["step"]: row["val_loss"] for row in metrics(folder) if "val_loss" in row and "after" not in row}


def lowest(folder: Path) -> int:
    found = validated(folder)
    return min(found, key=lambda step: found[step])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight") / "run", *RISES, STOP, *BEST, "steps=[train]", steps=30)


def test_training_ends_with_a_checkpoint_when_the_metric_has_not_got_better_for_long_enough(straight):
    found = validated(straight)
    assert [*found] == list(range(2, max(found) + 1, 2))
    assert max(found) == lowest(straight) + 4 < 30
    assert steps(straight) == list(range(1, max(found) + 1))
    assert checkpoints(straight) == [f"step-{step:06d}" for step in (lowest(straight), max(found))]
    assert status(straight)["status"] == "done"


def test_a_run_that_was_killed_just_then_does_not_train_on(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    say(folder, status="running", steps=[], metrics={})
    run(folder, *RISES, STOP, *BEST, "steps=[train]", steps=30)
    assert metrics(folder) == metrics(straight)


@pytest.mark.parametrize("layout", [(), shape(pp=2), shape(shard=4)], ids=["the same layout", "pp2", "shards"])
def test_one_that_goes_on_from_the_middle_stops_at_the_same_step_with_the_same_best(straight, tmp_path, layout):
    folder = tmp_path / "run"
    best = lowest(straight)
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "checkpoints" / checkpoints(folder)[-1])
    (folder / "checkpoints" / "latest").unlink()
    say(folder, status="running", steps=[], metrics={})
    run(folder, *RISES, STOP, *BEST, "steps=[train]", *layout, steps=30)
    assert checkpoints(folder) == checkpoints(straight)
    found, want = validated(folder), validated(straight)
    assert found.keys() == want.keys()
    assert all(abs(found[step] - want[step]) <= 1e-10 * want[step] for step in want)
    assert status(folder)["metrics"]["best_step"] == best


def test_a_least_gain_and_a_goal_are_heeded(tmp_path):
    done = run(tmp_path / "run", *RISES, "train.early_stop={patience: 1, min_delta: 10}", "steps=[train]", steps=30)
    assert [*validated(done)] == [2, 4]
    more = run(tmp_path / "max", *RISES, "train.early_stop={patience: 1, goal: max}", "steps=[train]", steps=30)
    found = validated(more)
    assert [b > a for a, b in zip(found.values(), [*found.values()][1:], strict=False)][:-1].count(False) == 0


def test_the_last_step_is_validated_too_and_the_best_is_named_where_a_checkpoint_is(tmp_path):
    verbs = "steps=[train,save,load,evaluate,verify,transform,export]"
    named = [
        f"steps.{step}={{{field}: best}}" for step, field in (("load", "path"), ("verify", "src"), ("export", "src"))
    ]
    done = run(
        tmp_path / "run", *RISES, *BEST, verbs, *named, "steps.transform.src=best", "checkpoint.every=3", steps=9
    )
    found = validated(done)
    assert [*found] == [2, 4, 6, 8, 9]
    assert checkpoints(done) == sorted({f"step-{lowest(done):06d}", "step-000009"})

    # steps after load use that checkpoint, and no row of the later steps is lost
    last = metrics(done)[-1]
    assert (last["step"], last["val_loss"]) == (lowest(done), pytest.approx(found[lowest(done)], rel=1e-12))
    assert steps(done) == list(range(1, 10))
    best = open_checkpoint(done / "checkpoints" / f"step-{lowest(done):06d}")
    weights = read_rank(best, single(best.strategy), 0, kinds=("param", "buffer"))
    exported = read_full(done / "exports" / "model.safetensors")
    assert all(bytes(exported[name].data) == bytes(blob.data) for name, blob in weights.items())


def test_a_run_that_was_stopped_before_a_validation_keeps_the_best_of_after_it(tmp_path):
    done = run(tmp_path / "run", *RISES[:2], RISES[3], steps=2)
    say(done, status="running", steps=[], metrics={})
    run(done, *RISES, *BEST, "steps=[train]", steps=2)
    state = open_checkpoint(done / "checkpoints/step-000002").state["results"]
    assert (state["best_step"], state["best_value"]) == (2, validated(done)[2])


def test_a_run_that_was_killed_loads_what_an_undisturbed_one_loads(tmp_path, capsys):
    words = ["steps=[train,save,load,evaluate]", "steps.evaluate.batches=1", "checkpoint.every=1"]
    words += ["checkpoint.keep=null", f"steps.load.path={tmp_path}/run/checkpoints/step-000002"]
    done = run(tmp_path / "run", *words, steps=4)
    want = status(done)["metrics"]["val_loss"]

    # killed after step 3
    shutil.rmtree(done / "checkpoints/step-000004")
    (done / "checkpoints/latest").unlink()
    say(done, status="running", steps=[], metrics={})
    run(done, *words, steps=4)
    assert status(done)["metrics"]["val_loss"] == want

    # a load is all that is requested
    run(done, "steps=[load,evaluate]", words[1], words[-1], steps=4)
    assert status(done)["metrics"]["val_loss"] == want
    assert capsys.readouterr().out.count("load: loaded") == 3


def test_the_best_of_another_run_is_not_that_of_this_one(straight, tmp_path):
    resume = f"checkpoint.resume={straight}/checkpoints/{checkpoints(straight)[-1]}"
    done = run(tmp_path / "run", *RISES, *BEST, resume, "steps=[train,save]", steps=14)
    assert status(done)["metrics"]["best_step"] == lowest(done)
    assert f"step-{lowest(done):06d}" in checkpoints(done)


@pytest.mark.parametrize(
    ("typed", "said", "cure"),
    [
        (
            ["train.early_stop={}"],
            "  train.early_stop.metric: val_loss: is read after validations, but no validation runs during training\n"
            "    set by: train.early_stop={} (command line)\n",
            "'train.early_stop={}' train.eval_every=2",
        ),
        (
            ["checkpoint.best=val_loss"],
            "  checkpoint.best = val_loss: is read after validations, but no validation runs during training\n"
            "    set by: checkpoint.best=val_loss (command line)\n",
            "checkpoint.best=val_loss train.eval_every=2",
        ),
        (
            ["checkpoint.best=accuracy", "train.eval_every=2"],
            "  checkpoint.best = accuracy: is not a metric of this run; use one of loss, val_loss\n"
            "    set by: checkpoint.best=accuracy (command line)\n",
            "checkpoint.best=val_accuracy 'metrics=[accuracy]'",
        ),
        (
            ["checkpoint.best=top_2", "train.eval_every=2", "metrics=[{name:top_k,k:2},perplexity]"],
            "  checkpoint.best = top_2: is not a metric of this run; use one of loss, val_loss, val_top_2, "
            "val_perplexity\n"
            "    set by: checkpoint.best=top_2 (command line)\n",
            "checkpoint.best=val_top_2",
        ),
        (
            ["train.early_stop={metric:val_los}", "train.eval_every=2"],
            "  train.early_stop.metric = val_los: is not a metric of this run; use one of loss, val_loss\n"
            "    set by: train.early_stop={metric:val_los} (command line)\n",
            "'train.early_stop={metric:val_loss}'",
        ),
        (
            ["steps=[train,save,export]", "steps.export.src=best", "train.eval_every=5"],
            "  steps.export.src = best: without checkpoint.best no checkpoint is recorded as the best\n"
            "    set by: steps.export.src=best (command line)\n",
            "steps.export.src=best checkpoint.best=val_loss",
        ),
    ],
    ids=["early stop", "best", "no metric", "not of validations", "misspelt", "nobody says which"],
)  # fmt: skip
def test_watching_a_metric_that_is_never_computed_is_refused(typed, said, cure, capsys):
    words = [*TINY, *shape(), "train.steps=20", "show=plan"]
    assert main([*words, *typed]) == 2
    assert capsys.readouterr().err == (
        f"error: 1 problem in this request; nothing was started\n\n{said}    try:    {cure}\n"
    )
