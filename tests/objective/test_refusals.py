"""If a loss or a metric cannot be computed, the plan refuses it by name, or the run ends with its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from launcher.runtime.training import loop
from launcher.steps.model import build_session
from tests.objective.test_parity import HEAD, HOLED, OWN, VALUES
from tests.parity import job
from tests.ranks import DRAWN, on_ranks

PP: dict[str, Any] = {"pipeline": {"stages": 2, "micro_batch_num": 2}}
PIECES: dict[str, Any] = {"pipeline": {"stages": 2, "micro_batch_num": 2, "seq_chunks": 2, "scheduler": "seqpipe"}}
NO_MEAN = (
    "Return the sum over samples and their number; compute a metric that is no such mean, such as F1 or AUC, from the "
    "outputs that the step predict writes"
)
CUT = "a batch is cut into micro batches and over ranks, so sums and counts must add up"


def own(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{OWN}.{name}", **arguments}


def job_with_loss(**changes: Any) -> Job:
    tp = "operators" in changes.get("parallel", {})
    return job(**{"parallel": PP, "data": HOLED, "security__allow": ("tests",), "model__tied": not tp, **changes})


OUTPUT = "and the model's output is float64 (4, 8, 64)"
REFUSED: dict[str, tuple[Job, str]] = {
    "mse of class numbers": (
        job_with_loss(loss={"name": "mse"}),
        f"loss: mse: for 4 samples targets are int64 (4, 8) {OUTPUT}; it compares them element by element: return "
        "targets as float32",
    ),
    "bce of another shape": (
        job_with_loss(loss={"name": "bce"}, data=VALUES | {"target": [8, 1]}),
        f"loss: bce: for 4 samples targets are float64 (4, 8, 1) {OUTPUT}; it compares them element by element: "
        "give both the same shape",
    ),
    "cross entropy of numbers": (
        job_with_loss(data=VALUES),
        "data: targets are float64, but the loss is the cross entropy of class numbers; return them as int64 "
        f"(try: loss=mse); data: for 4 samples targets are float64 (4, 8, 64) {OUTPUT}; an output must be (samples, "
        "..., classes) or (samples, classes, ...), and targets must have all its dims except the classes",
    ),
    "accuracy of numbers": (
        job_with_loss(loss={"name": "mse"}, data=VALUES, metrics=["accuracy"]),
        f"metrics: accuracy: targets are float64 (4, 8, 64) {OUTPUT}; it compares class numbers with logits",
    ),
    "all of the classes": (
        job_with_loss(metrics=[{"name": "top_k", "k": 64}]),
        "metrics: top_64: with 64 classes every target is in the top 64",
    ),
    "two of a name": (
        job_with_loss(metrics=["accuracy", "perplexity", "accuracy"]),
        "metrics: two metrics have the name accuracy; keep one (try: 'metrics=[accuracy,perplexity]')",
    ),
    "bytes that nobody knows": (
        job_with_loss(metrics=["bits_per_byte", "accuracy"]),
        "metrics: bits_per_byte: data of a class of your own does not say how many bytes of text a token stands for "
        "(try: 'metrics=[accuracy]')",
    ),
    "a loss without a count": (
        job_with_loss(loss=own("Uncounted")),
        f"loss._target_: {OWN}.Uncounted: it has no method count(target); define one: the loss is divided by its "
        "result, which must be known before the forward",
    ),
    "another count": (
        job_with_loss(loss=own("Miscounted", step=0.0)),
        f"loss._target_: {OWN}.Miscounted: it counts 10, but its count(target) is 11; both must be the same",
    ),
    "a sum without a gradient": (
        job_with_loss(loss=own("Detached")),
        f"loss._target_: {OWN}.Detached: its sum has no gradient: compute it from the output with torch's operations",
    ),
    "a sum that is none": (
        job_with_loss(loss=own("Rowwise")),
        f"loss._target_: {OWN}.Rowwise: its sum is a tensor of shape (4, 8) where one number was expected; add up all "
        "samples",
    ),
    "parameters": (
        job_with_loss(loss=own("Learned")),
        f"loss._target_: {OWN}.Learned: it has parameters that would not be trained; move them into the model",
    ),
    "an output that is cut over tp": (
        job_with_loss(loss=own("Weighted"), parallel={"operators": HEAD, "grid": {"tp": 2}}),
        "parallel.operators: your own loss or metric takes full outputs, but their last dim is cut over tp; "
        "leave the module that makes it out of parallel.operators",
    ),
    "a name that is taken": (
        job_with_loss(metrics=[{"_target_": f"{OWN}.loss"}]),
        "metrics: loss is reported in every step; rename the class",
    ),
    "a name of the run's own state": (
        job_with_loss(metrics=[{"_target_": f"{OWN}.SavedStep"}, {"_target_": f"{OWN}.ValLoss"}]),
        "metrics: saved_step is a name that the run uses itself; rename the class; "
        "metrics: val_loss is a name that the run uses itself; rename the class",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_losses_and_metrics_that_cannot_be_computed_are_refused(case: str) -> None:
    j, text = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        plan_job(j)
    assert "; ".join(map(str, caught.value.problems)) == text


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "loss",
    [own("Narrow"), own("OfOneDtype", dtype="float32"), own("Float32Weights")],
    ids=["narrow", "of one dtype", "weights"],
)
def test_a_loss_is_tried_in_the_dtype_of_the_run(loss: dict[str, Any], precision: str) -> None:
    plan_job(job_with_loss(loss=loss, train__precision=precision))


def test_a_loss_of_another_dtype_than_the_run_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        plan_job(job_with_loss(loss=own("OfOneDtype", dtype="float64"), train__precision="fp32"))
    (problem,) = caught.value.problems
    assert "it cannot be called with an output of shape (4, 8, 64) float32 and targets" in problem.text
    assert "expected m1 and m2 to have the same dtype, but got: float != double" in problem.text


def test_a_float32_loss_that_does_not_add_up_over_samples_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        plan_job(job_with_loss(loss=own("NarrowMean", dtype="float32"), train__precision="fp32"))
    assert str(caught.value).endswith(f"; {CUT}")


@pytest.mark.parametrize(
    "loss",
    [own("Rounded", dtype="float32", share=1e-4), own("Rounded", dtype="float16", share=0.02), own("Miscounts")],
    ids=["a ten thousandth", "half", "counts"],
)
def test_no_dtype_of_the_loss_excuses_sums_that_do_not_add_up(loss: dict[str, Any]) -> None:
    """The tolerance is the precision of fp32, however few bits the loss itself keeps."""
    with pytest.raises(RequestError) as caught:
        plan_job(job_with_loss(loss=loss, train__precision="fp32"))
    assert str(caught.value).endswith(f"; {CUT}")


@pytest.mark.parametrize(("name", "key"), [("MeanOfMeans", "loss"), ("Largest", "metrics")])
@pytest.mark.parametrize("parallel", [PP, PIECES], ids=["pp", "pieces"])
def test_a_loss_or_metric_that_does_not_add_up_over_samples_is_refused(
    name: str, key: str, parallel: dict[str, Any]
) -> None:
    change: dict[str, Any] = {"loss": own(name)} if key == "loss" else {"metrics": [own(name)]}
    with pytest.raises(RequestError) as caught:
        plan_job(job_with_loss(parallel=parallel, **change))
    (problem,) = caught.value.problems
    assert problem.key == ("loss._target_" if key == "loss" else key)
    assert problem.text.startswith(f"{OWN}.{name}: its sum over all samples is ")
    assert problem.text.endswith(f"; {CUT}" if key == "loss" else f"; {CUT}. {NO_MEAN}")


def test_a_loss_or_metric_that_is_another_in_batches_of_the_request_or_for_pairs_is_refused() -> None:
    metrics = [own("Pairs"), own("DoublesBatches")]
    with pytest.raises(RequestError) as caught:
        plan_job(job_with_loss(parallel={}, loss=own("MiscountedBatches"), metrics=metrics))
    loss, pairs, doubles = caught.value.problems
    assert loss.text == f"{OWN}.MiscountedBatches: it counts 63.1, but its count(target) is 64.1; both must be the same"
    assert pairs.text.startswith(f"{OWN}.Pairs: its sum over all samples is ")
    assert doubles.text == (
        f"{OWN}.DoublesBatches: its sum over all samples is 128, but over two parts of them 64; {CUT}. {NO_MEAN}"
    )


UNSTEADY: dict[str, str] = {
    "HookedNorm": "its gradient over all samples differs from that over two parts of them; a batch is cut into micro "
    "batches and over ranks, so the backward of a sample must not depend on the others",
    "DetachedWeights": "its gradient over all samples differs from that over two parts of them",
    "FlipsLabels": "it draws random numbers, and each layout would draw others; draw in the model or the data",
    "OwnTemperature": "it has a tensor that requires a gradient, which would not be trained; move it into the model",
    "WarmsUp": "it counts its calls (calls), and its sum changes after more of them; each layout calls it "
    "another number of times, and no checkpoint contains the count. Count in a buffer of the model",
    "WarmsUpElsewhere": "it counts its calls (calls), and its sum changes after more of them",
    "HardOnly": "its sum over all samples is ",
    "ByPlace": "its sum over all samples is ",
    "Rewrites": "it counts 9, but its count(target) is 10; both must be the same",
}  # fmt: skip


@pytest.mark.parametrize("name", UNSTEADY)
def test_a_loss_that_another_layout_would_train_differently_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan_job(job_with_loss(loss=own(name), data=HOLED))
    (problem,) = caught.value.problems
    assert problem.key == "loss._target_"
    assert problem.text.startswith(f"{OWN}.{name}: {UNSTEADY[name]}")


CHANGING: dict[str, str] = {
    "Softmaxed": "it changes its output or its targets in place, which the loss and other metrics use too; clone them "
    "first",
    "IgnoresFirst": "it counts its calls (calls), and its sum changes after more of them; each layout calls it another "
    "number of times, and no checkpoint contains the count. Compute it from its arguments alone",
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_metric_that_depends_on_calls_or_changes_what_others_use_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan_job(job_with_loss(metrics=[own(name)], data=HOLED))
    (problem,) = caught.value.problems
    assert (problem.key, problem.text) == ("metrics", f"{OWN}.{name}: {CHANGING[name]}")


def test_a_metric_that_adds_up_the_ranks_itself_is_refused_on_several() -> None:
    with pytest.raises(RequestError) as caught:
        plan_job(job_with_loss(metrics=[own("Gathered")]))
    assert str(caught.value) == (
        f"metrics: {OWN}.Gathered: it asks for torch.distributed.is_initialized(), but 2 ranks get another answer than "
        "one process, so another layout gives other numbers; remove it: the launcher combines samples, gradients, "
        "losses and metrics itself"
    )
    plan_job(job_with_loss(metrics=[own("Gathered")], parallel={}))


def test_a_loss_that_changes_its_output_in_place_is_planned() -> None:
    plan_job(job_with_loss(loss=own("InPlace")))


def rank_steps(world: World, j: Job, plan: Plan, folder: Path) -> None:
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    loop.step(s, None, measuring=True)
    loop.validate(s, None)


ENDS: dict[str, tuple[Job, str]] = {
    "a metric that is NaN in training": (
        job_with_loss(metrics=[own("Holes", nan_from=4)]),
        "step 1: the metric holes is NaN (sum nan, count 64). Look at the metric, or at the data of this step",
    ),
    "a metric that is NaN in a validation": (
        job_with_loss(metrics=["accuracy", own("Holes", nan_from=1)]),
        "validation after step 0: the metric holes is NaN (sum nan, count 104). Look at the metric, or at the data of "
        "this step",
    ),
    "a count that differs later": (
        job_with_loss(loss=own("LaterMiscounted"), parallel={}),
        "step 1: the count that the loss returns differs from its count(target), by which its sum is divided; the "
        "weights were not changed. Look at the class of the loss",
    ),
    "a number that is no share": (
        job_with_loss(loss={"name": "bce"}, data=VALUES | {"wrong": 1.5}),
        "step 1: the target of training sample 5 at 7, 63 is 1.5, but the loss bce takes numbers from 0 to 1. Look at "
        "the data",
    ),
    "nothing that counts": (
        job_with_loss(data=HOLED | {"hole": 3, "empty": 1}, loss={"name": "cross_entropy", "ignore_index": 3}),
        "step 1: all targets of the global batch are 3, which are ignored, so there is no loss; the weights were "
        "not changed. Look at the data of this step",
    ),
    "nothing that counts for a loss of one's own": (
        job_with_loss(data=HOLED | {"empty": 1}, loss=own("Weighted")),
        "step 1: count(target) of the loss is 0 for the global batch, so there is no loss; the "
        "weights were not changed. Look at the data of this step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_a_loss_that_fails_in_the_run_ends_every_rank_and_is_named(case: str, tmp_path: Path) -> None:
    j, text = ENDS[case]
    plan = plan_job(j)
    with pytest.raises(RanksFailed) as failed:
        on_ranks(plan.sizes.grid.size, rank_steps, j, plan, tmp_path)
    assert failed.value.fault.message == text
