"""A model that returns a tuple or a dict of tensors, with a user's loss that takes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.__main__ import main
from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from launcher.steps.model import evaluate_in_one_process
from tests.objective import trained
from tests.parallel.sources import Holed
from tests.parity import job, plain
from tests.tiers import some

OWN = "tests.objective.structured"
SHARD: dict[str, Any] = {"shard_size": 2, "threshold": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pipeline": {"stages": 2, "micro_batch_num": 4}},
    "level1": {"hsdp": SHARD},
    "level2 x pp2": {"pipeline": {"stages": 2}, "hsdp": SHARD | {"optimizer_level": "level2"}},
    "level3": {"pipeline": {"micro_batch_num": 2}, "hsdp": SHARD | {"optimizer_level": "level3"}},
    "interleaved": {"pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 4}},
    "zero bubble": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4}},
    "zero bubble v": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_v", "micro_batch_num": 4}},
}
KINDS: dict[str, dict[str, Any]] = {
    "tuple": {},
    "dict": {},
    "list": {},
    "many": {"model": {"_target_": f"{OWN}.Many", "kind": "dict"}, "loss": {"_target_": f"{OWN}.OfMany"}},
}


def job_with_heads(kind: str, parallel: Mapping[str, Any], **changes: Any) -> Job:
    return job(**{
        "parallel": parallel, "model": {"_target_": f"{OWN}.Heads", "kind": kind},
        "data": {"_target_": "tests.parallel.sources.Holed", "seq_len": 8}, "loss": {"_target_": f"{OWN}.CombinedLoss"},
        "metrics": [{"_target_": f"{OWN}.ValueDistance"}], "security__allow": ("tests",),
        "optim": {"name": "sgd", "lr": trained.LR}, "train__steps": trained.STEPS, **changes,
    })  # fmt: skip


def mean(output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the metric of a full batch, computed explicitly."""
    logits, value = (output["logits"], output["value"]) if isinstance(output, dict) else output
    counts = y != -100
    chosen = torch.log_softmax(logits[counts], -1)[torch.arange(int(counts.sum())), y[counts]]
    off = value[counts] - y[counts] / 64
    return (-chosen + 0.3 * off**2).mean(), off.abs().mean()


@pytest.mark.parametrize("layout", some(LAYOUTS, one_in=2))
def test_structured_outputs_train_as_in_plain_torch(layout: str, tmp_path: Path) -> None:
    jobs = {kind: job_with_heads(kind, LAYOUTS[layout], **changes) for kind, changes in KINDS.items()}
    train, held = Holed(8, "train"), Holed(8, "val")
    for kind, (plan, got) in trained.on_layouts(jobs, tmp_path).items():
        model = plain(jobs[kind], plan)
        want = trained.alone(model, lambda model=model: mean(model(train.tokens), train.following)[0])
        with torch.no_grad():
            loss, distance = mean(model(held.tokens), held.following)
        want.held_out = {"val_loss": loss.item(), "val_value_distance": distance.item()}
        trained.assert_same(got, want)
        assert evaluate_in_one_process.held_out(model, jobs[kind], None)["loss"] == pytest.approx(
            loss.item(), rel=1e-12
        )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_a_loss_gets_float32(precision: str, tmp_path: Path) -> None:
    job = job_with_heads("dict", LAYOUTS["pp2"], train__precision=precision, loss={"_target_": f"{OWN}.Wide"})
    ((_, got),) = trained.on_layouts({"": job}, tmp_path).values()
    assert all(map(math.isfinite, got.losses))


def test_the_plan_has_the_keys_and_shapes_of_the_outputs() -> None:
    plan = plan_job(job_with_heads("dict", LAYOUTS["pp2"]))
    assert plan.output_keys == ("value", "logits")
    assert [t.shape for t in plan.output] == [(2, 8), (2, 8, 64)]
    assert plan_job(job_with_heads("tuple", {})).output_keys == (0, 1)


RETURNS = "but the model returns a dict of value, logits"
ALONE = "return only the logits, such as out.logits or out['logits']"
NEITHER = (
    "neither a tensor nor a plain tuple, list or dict of tensors; for a loss of your own return one of these, "
    "otherwise "
    "return only the logits, here or in a derived class: def forward(self, *inputs): return super().forward(*inputs)"
)
WHY = (
    "the loss is summed over samples, across all micro batches: return one or more numbers for each sample along dim 0"
)
TP = {"grid": {"tp": 2}, "operators": {"head": {"weight": ["tp", None]}}}
SLICES = {"operators": {"layers.0.1": {"in": [[1, 1, 4], [4, 1]]}, "head": {"in": [[2, 1, 2], [2, 1]]}}}
PIPELINE = {"pipeline": {"micro_batch_num": 4}}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "loss": (
        {"loss": {"name": "cross_entropy"}, "metrics": []},
        [
            "model: its forward returns a dict of value, logits, but loss=cross_entropy takes one tensor; "
            f"{ALONE}, or name a loss of your own in loss._target_"
        ],
    ),
    "metric": ({"metrics": ["accuracy"]}, [f"metrics: accuracy: a built-in metric takes one tensor, {RETURNS}"]),
    "predict": (
        {"steps": {"predict": {"kind": "predict"}}},
        [f"steps.predict: this step takes one tensor, {RETURNS}"],
    ),
    "broadcast": (
        {"parallel": {"pipeline": {"stages": 2, "output_broadcast": True}}},
        [
            f"parallel.pipeline.output_broadcast: true: it broadcasts one tensor, {RETURNS} "
            "(try: parallel.pipeline.output_broadcast=false)"
        ],
    ),
    "pieces": (
        {"parallel": {"pipeline": {"stages": 2, "seq_chunks": 2, "scheduler": "seqpipe"}}},
        [
            f"parallel.pipeline.seq_chunks: 2: the outputs of all pieces are joined into one tensor, {RETURNS} "
            "(try: parallel.pipeline.seq_chunks=1 parallel.pipeline.scheduler=1f1b)"
        ],
    ),
    "operators": (
        {"parallel": TP, "launch__nproc": 2},
        [
            "parallel.operators.head: the model's output is cut on dim 2 over tp, but the loss takes a full "
            "output or one cut on its classes (try: 'parallel.operators.head.output=[null, null, null]')"
        ],
    ),
    "operators of one in a tuple": (
        {"model": {"_target_": f"{OWN}.Single", "kind": "tuple"}, "parallel": TP, "launch__nproc": 2},
        [
            "parallel.operators: tp can cut the output only if it is one tensor, but the model returns a tuple of "
            "1 tensor; leave the module that makes it out of parallel.operators"
        ],
    ),
    "device matrix": (
        {"parallel": SLICES, "launch__nproc": 4},
        [f"parallel.operators: tp can cut the output only if it is one tensor, {RETURNS}"],
    ),
    "named": (
        {"model": {"_target_": f"{OWN}.Heads", "kind": "named"}},
        [f"model: its forward returns Named(logits=Tensor, value=Tensor), {NEITHER}.logits"],
    ),
    "nested": (
        {"model": {"_target_": f"{OWN}.NestedOutput", "kind": "tuple"}},
        [
            "model: its forward returns {'logits': Tensor, 'inner': {'value': Tensor}}, "
            f"{NEITHER}['logits']"
        ],
    ),
    "with nothing": (
        {"model": {"_target_": f"{OWN}.LogitsAndNone", "kind": "tuple"}},
        [f"model: its forward returns (Tensor, None), {NEITHER}[0]"],
    ),
    "of no sample": (
        {"model": {"_target_": f"{OWN}.Balanced", "kind": "dict"}, "parallel": PIPELINE},
        [f"model: 'aux' of the output of its forward is () for 2 samples and () for 3; {WHY}"],
    ),
    "as many as samples": (
        {"model": {"_target_": f"{OWN}.Balanced", "kind": "dict", "experts": 2}, "parallel": PIPELINE},
        [f"model: 'aux' of the output of its forward is (2,) for 2 samples and (2,) for 3; {WHY}"],
    ),
    "its own loss": (
        {"model": {"_target_": f"{OWN}.Balanced", "kind": "alone"}, "parallel": PIPELINE},
        [f"model: the output of its forward is () for 2 samples and () for 3; {WHY}"],
    ),
    "of two samples alone": (
        {"model": {"_target_": f"{OWN}.Fixed", "kind": "dict", "experts": 3}, "parallel": PIPELINE},
        [f"model: 'aux' of the output of its forward is (3,) for 2 samples; {WHY}"],
    ),
    "whole numbers": (
        {"model": {"_target_": f"{OWN}.IntegerOutputs", "kind": "dict"}},
        ["model: its forward returns only integers, which get no gradient"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loss_that_does_not_take_these_outputs_is_refused(kind: str) -> None:
    changes, said = REFUSED[kind]
    changes = dict(changes)
    with pytest.raises(RequestError) as refused:
        plan_job(job_with_heads("dict", changes.pop("parallel", {}), **changes))
    assert str(refused.value).splitlines() == said


def test_a_model_with_structured_outputs_is_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "recipe=null", "model=null", f"model._target_={OWN}.Heads", "model.kind=dict", "data=null",
        "data._target_=tests.parallel.sources.Holed", "data.seq_len=8",
        "loss=null", f"loss._target_={OWN}.CombinedLoss",
        "security.allow=[tests]", "train.steps=3", "train.batch_size=8", "launch.nproc=4", "name=heads",
        "parallel.pipeline.stages=2", "parallel.hsdp={shard_size: 2, threshold: 0}", "steps=[certify]",
        f"run_dir={tmp_path}/run", "logger=plain",
    ]  # fmt: skip
    assert main(words) == 0, capsys.readouterr().err
    assert "certify: holds: " in capsys.readouterr().out
