"""A user's own targets and outputs: the loss of torch's cross entropy on the full batch, or a refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.plan.values.class_dims import class_dims
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from launcher.runtime.faults import RanksFailed
from launcher.runtime.training import loop
from launcher.steps.model import build_session, evaluate_in_one_process
from tests.parallel.sources import Labeled
from tests.parity import job
from tests.parity.reference import plain
from tests.ranks import DRAWN, on_ranks

SHARD: dict[str, Any] = {"shard_size": 2, "threshold": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, 4 micro batches": {"pipeline": {"micro_batch_num": 4}},
    "pp2": {"pipeline": {"stages": 2, "micro_batch_num": 4}},
    "pp2 x shard 2, level3": {"pipeline": {"stages": 2}, "hsdp": SHARD | {"optimizer_level": "level3"}},
    "shard 2, level2": {"hsdp": SHARD | {"optimizer_level": "level2"}},
    "2 replicas": {"grid": {"dp_replicate": 2}},
    "zero_bubble_h1": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4}},
}
IMAGES: dict[str, Any] = {"shape": [3, 6, 5], "target": [6, 5], "classes": 4, "held_out": 13}


def trained(model: dict[str, Any], data: dict[str, Any], layout: str = "one rank", **more: Any) -> Job:
    model = model | {"_target_": f"tests.parallel.evaluation_nets.{model['_target_']}"}
    data = {"_target_": "tests.parallel.sources.Labeled"} | data
    return job(model=model, data=data, parallel=LAYOUTS[layout], security__allow=("tests",), **more)


def images(layout: str, classes: int, **data: Any) -> Job:
    """Return a job on ``IMAGES``, which has four classes; a model may have more."""
    return trained({"_target_": "Images", "classes": classes}, IMAGES | data, layout, train__steps=3)


def rank_trains(world: World, j: Job, plan: Plan, folder: Path) -> tuple[float, float, float]:
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    return loop.validate(s, None), *loop.step(s, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("classes", [4, 5], ids=["4 classes", "as many classes as columns"])
def test_images_of_classes_equal_torch_on_the_whole_batch(layout, classes, tmp_path):
    j = images(layout, classes, samples=8, holes=0.3)
    plan = plan_job(j)
    model = plain(j, plan)
    data, val = (Labeled([3, 6, 5], [6, 5], 4, s, samples=8, held_out=13, holes=0.3) for s in ("train", "val"))
    loss = F.cross_entropy(model(data.x), data.y, ignore_index=-100)  # torch's own, as written in a plain loop
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    with torch.no_grad():
        held = F.cross_entropy(model(val.x), val.y, ignore_index=-100)
    want = torch.stack([held, loss.detach(), norm])
    for got in on_ranks(plan.sizes.grid.size, rank_trains, j, plan, tmp_path):
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), want, rtol=1e-12, atol=0)
    assert abs(evaluate_in_one_process.held_out_loss(model, j, None) - held.item()) <= 1e-12


def test_a_square_has_its_classes_last_first():
    assert class_dims((8, 5, 5), (8, 5)) == (2, 1)
    assert class_dims((8,), (8,)) == class_dims((8, 5), ()) == class_dims((4, 8), (4, 2)) == ()


LOGITS = "return only the logits, such as out.logits or out['logits']"
RETURNED = f"but loss=cross_entropy takes one tensor; {LOGITS}, or name a loss of your own in loss._target_"
FIT = (
    "an output must be (samples, ..., classes) or (samples, classes, ...), and targets must have all its dims except "
    "the classes"
)
OWN = "tests.parallel.sources.Labeled"
TOKENS = {"shape": [7, 6], "target": [7], "classes": 5}


def returned(how: str, **data: Any) -> Job:
    return trained({"_target_": "Returned", "how": how}, TOKENS | data)


REFUSED = {
    "one target for several positions": (
        returned("tensor", target=[]),
        f"data: for 8 samples targets are int64 (8,) and the model's output is float64 (8, 7, 5); {FIT}",
    ),
    "a dim too many": (
        returned("tensor", target=[7, 1]),
        f"data: for 8 samples targets are int64 (8, 7, 1) and the model's output is float64 (8, 7, 5); {FIT}",
    ),
    "samples and positions in one dim": (
        returned("flat"),
        f"data: for 8 samples targets are int64 (8, 7) and the model's output is float64 (56, 5); {FIT}",
    ),
    "a square": (
        trained({"_target_": "Returned", "how": "tensor"}, {"shape": [5, 6], "target": [5], "classes": 5}),
        "data: for 8 samples targets are int64 (8, 5) and the model's output is float64 (8, 5, 5): its classes may "
        "be on dim 1 or on dim 2; choose sizes that differ, or name a loss of your own in loss._target_",
    ),
    "floating targets": (
        returned("tensor", dtype="float32"),
        "data: targets are float32, but the loss is the cross entropy of class numbers; return them as int64",
    ),
    "int32": (
        returned("tensor", dtype="int32"),
        "data: targets are int32, but the loss is the cross entropy of class numbers; return them as int64",
    ),
    "more targets than samples": (
        returned("tensor", more=1),
        f"data: {OWN}: targets() of 2 indices returns a tensor of shape (3, 7); dim 0 must be the samples: "
        "return one for each index, in order",
    ),
    "another kind of held-out samples": (
        returned("tensor", other="int32"),
        f"data: {OWN}: samples of the split train are float64 (7, 6) -> int64 (7,), of val float64 (7, 6) -> int32 "
        "(7,); both splits must have the same kind",
    ),
    "two tensors": (returned("tuple"), f"model: its forward returns a tuple of 2 tensors, {RETURNED}"),
    "a tuple of one": (returned("alone"), f"model: its forward returns a tuple of 1 tensor, {RETURNED}"),
    "a dict": (returned("dict"), f"model: its forward returns a dict of logits, {RETURNED}"),
    "no logits": (
        returned("best", target=[]),
        "model: its forward returns int64, but the loss takes floating-point logits, one per class",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_targets_that_do_not_fit_the_loss_are_refused_by_the_plan(case):
    j, text = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        plan_job(j)
    assert str(caught.value) == text


WHY = (
    "but the model's output has 4 classes: 0 to 3, and -100 is ignored. "
    "Look at the data, or give the model more classes"
)


def rank_steps(world: World, j: Job, plan: Plan, folder: Path) -> None:
    s = build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN)
    for step in range(3):  # one epoch
        loop.step(s, None)
        s.step = step + 1


def rank_validates(world: World, j: Job, plan: Plan, folder: Path) -> None:
    loop.validate(build_session.build(replace(world, send=lambda _: None), j, plan, folder, drawn=DRAWN), None)


@pytest.mark.parametrize("layout", ["one rank", "pp2", "2 replicas", "pp2 x shard 2, level3"])
@pytest.mark.parametrize("wrong", [4, -1])
def test_a_class_that_is_none_ends_the_run_with_its_sample(layout, wrong, tmp_path):
    j = images(layout, 4, wrong=wrong)
    plan = plan_job(j)
    for work, where, split in ((rank_steps, "step ", "training"), (rank_validates, "validation", "held-out")):
        with pytest.raises(RanksFailed) as failed:
            on_ranks(plan.sizes.grid.size, work, j, plan, tmp_path)
        fault = failed.value.fault
        assert fault.explains_itself
        assert fault.message.startswith(where)
        end = f": the target of {split} sample 5 at 5, 4 is {wrong}, {WHY}"
        assert fault.message.removeprefix(where).lstrip("123") == end


def test_bytes_are_class_numbers_as_in_torch(tmp_path):
    j = images("pp2", 4, dtype="uint8", samples=8)
    plan = plan_job(j)
    data = Labeled([3, 6, 5], [6, 5], 4, "train", samples=8)
    want = F.cross_entropy(plain(j, plan)(data.x), data.y.long()).item()
    for _, loss, _ in on_ranks(plan.sizes.grid.size, rank_trains, j, plan, tmp_path):
        assert abs(loss - want) <= 1e-12


LATER = {
    "another number of targets": (
        {"later": 1},
        "step 1: 8 training samples were requested, and the data returned 9, in a tensor of shape (9, 6, 5); "
        "return one for each index, in order",
    ),
    "inputs of another shape": (
        {"shape": [3, 6, 4], "target": [6, 4]},
        "the data returned inputs of shape (3, 6, 4) for a sample, but the plan is for (3, 6, 5), the shape of "
        "the first sample; all samples must have one shape",
    ),
    "targets of another shape": (
        {"target": [5, 6]},
        "targets of shape (4, 5, 6) do not fit an output of shape (4, 4, 6, 5)",
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_samples_that_turn_out_otherwise_end_the_run_with_what_was_planned(case, tmp_path):
    """The plan has seen only the first samples."""
    changes, text = LATER[case]
    layout = {"pipeline": {"stages": 2, "micro_batch_num": 2}}
    planned, found = (images("pp2", 4, **more) for more in ({}, changes))
    planned, found = (j.model_copy(update={"parallel": job(parallel=layout).parallel}) for j in (planned, found))
    plan = plan_job(planned)
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, rank_steps, found, plan, tmp_path)
    assert (failed.value.fault.explains_itself, failed.value.fault.message) == (True, text)
