"""Models with side effects are refused, with the reason, in layouts that would lose these effects."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.job.schema.steps import Calibrate, Certify, Train
from launcher.plan.refusals.model import untrained
from launcher.plan.values.model_graph import Graph, ModelStructure, Param
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.planner.plan_job import plan_job
from tests.parallel.trace.test_tensor_side_effects import PP, net

TP = {"middle.lin": {"weight": ["tp", None]}, "b": {"weight": [None, "tp"]}}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "Clamped",
        "pp2",
        {},
        (
            "model: the forward changes the parameter middle.lin.weight in place, and "
            "the backward of another micro batch still needs the old values; compute "
            "with a copy, weight.clone()"
        ),
    ),
    (
        "Second",
        "replicas",
        {},
        (
            "model: the forward changes the parameter middle.slow.bias from rank-local data and then reads it: each "
            "of 2 data-parallel ranks would train another model; use one data-parallel rank"
            " (try: launch.nproc=1 parallel.grid.dp_replicate=1)"
        ),
    ),
    (
        "Listing",
        "level3",
        {},
        (
            "model: a, b: its forward changes a list or dictionary argument, but FSDP2 passes a copy to modules with "
            "sharded weights; return what it adds, "
            "or shard nothing (try: parallel.hsdp=null)"
        ),
    ),
    (
        "Rows",
        "replicas",
        {},
        (
            "model: the forward changes the parameter middle.table.weight from rank-local data and then reads it: "
            "each of 2 data-parallel ranks would train another model; use one data-parallel rank"
            " (try: launch.nproc=1 parallel.grid.dp_replicate=1)"
        ),
    ),
    (
        "Rows",
        "pp2 level2",
        {},
        (
            "model: the forward changes the parameter middle.table.weight from rank-local data and then reads it: "
            "each of 2 data-parallel ranks would train another model; use one data-parallel rank"
            " (try: launch.nproc=2 parallel.hsdp=null)"
        ),
    ),
    (
        "Centered",
        "replicas",
        {},
        (
            "model: the forward changes the buffer middle.mean from rank-local data and then reads it: each of 2 "
            "data-parallel ranks would train another model; use one data-parallel rank"
            " (try: launch.nproc=1 parallel.grid.dp_replicate=1)"
        ),
    ),
    (
        "Centered",
        "level1",
        {},
        (
            "model: the forward changes the buffer middle.mean from rank-local data and then reads it: each of 2 "
            "data-parallel ranks would train another model; use one data-parallel rank"
            " (try: launch.nproc=1 parallel.hsdp=null)"
        ),
    ),
    (
        "Decayed",
        "replicas",
        {},
        (
            "model: the parameter middle.lin.weight has hooks, and each of 2 "
            "data-parallel ranks would call them with the gradient of its own samples "
            "only; change gradients in your own optimizer, or use one "
            "data-parallel rank (try: launch.nproc=1 parallel.grid.dp_replicate=1)\n"
            "model: the parameter middle.lin.bias has hooks, and "
            "each of 2 data-parallel ranks would call them with the gradient of its own "
            "samples only; change gradients in your own optimizer, or use one "
            "data-parallel rank (try: launch.nproc=1 parallel.grid.dp_replicate=1)"
        ),
    ),
    (
        "Decayed",
        "level3",
        {},
        (
            "model: the parameter middle.lin.weight has hooks, and each of 2 "
            "data-parallel ranks would call them with the gradient of its own samples "
            "only; change gradients in your own optimizer, or use one "
            "data-parallel rank (try: launch.nproc=1 parallel.hsdp=null)\n"
            "model: the parameter middle.lin.bias has hooks, and "
            "each of 2 data-parallel ranks would call them with the gradient of its own "
            "samples only; change gradients in your own optimizer, or use one "
            "data-parallel rank (try: launch.nproc=1 parallel.hsdp=null)"
        ),
    ),
    (
        "Decayed",
        "zbv",
        {},
        (
            "model: the parameter middle.lin.weight has hooks, and zero_bubble_v splits "
            "the backward, which bypasses hooks (try: "
            "parallel.pipeline.scheduler=1f1b)\nmodel: the parameter middle.lin.bias has "
            "hooks, and zero_bubble_v splits the backward, which bypasses hooks (try: "
            "parallel.pipeline.scheduler=1f1b)"
        ),
    ),
    (
        "Penalized",
        "level1",
        {},
        (
            "model: middle computes gradients itself (torch.autograd.grad), and its sharded "
            "weights are not gathered at that point (try: parallel.hsdp=null)"
        ),
    ),
    (
        "Penalized",
        "zbh1",
        {},
        (
            "model: middle computes gradients itself (torch.autograd.grad), and zero_bubble_h1 splits the backward"
            " (try: parallel.pipeline.scheduler=1f1b)"
        ),
    ),
    (
        "Penalized",
        "pp2",
        {"backward": True},
        (
            "model: middle calls backward(), and the path of the gradient leads to "
            "another stage; put all of it in one module"
        ),
    ),
    (
        "Crossing",
        "pp2",
        {},
        (
            "model: c computes gradients itself (torch.autograd.grad), and the path of the "
            "gradient leads to another stage; put all of it in one module"
        ),
    ),
    (
        "Between",
        "pp2",
        {},
        (
            "model: the forward changes the parameter b.weight in place, and the "
            "backward of another micro batch still needs the old values; compute with a "
            "copy, weight.clone()"
        ),
    ),
    (
        "Between",
        "pp2",
        {"grads": True},
        (
            "model: the model's own forward computes gradients itself "
            "(torch.autograd.grad), and that code is between the named modules, so the "
            "path of the gradient may lead to another stage; put all of it in one module"
        ),
    ),
    (
        "Complex",
        "one",
        {},
        (
            "model: middle.turn is a parameter of complex128, which optimizers, norms and sharding do not support here;"
            " store it as real numbers with a last dim of 2, and use torch.view_as_complex in the forward"
        ),
    ),
    (
        "Phases",
        "one",
        {},
        (
            "model: middle.turn is a buffer of complex128, which checkpoints cannot "
            "store; store it as real numbers with a last dim of 2"
        ),
    ),
    (
        "Sparse",
        "one",
        {},
        (
            "model: middle.table.weight: looked up with sparse=True, but the launcher can neither sum nor clip "
            "sparse gradients; remove sparse=True: dense "
            "gradients have the same numbers"
        ),
    ),
    (
        "Sparse",
        "pp2",
        {"bag": True},
        (
            "model: middle.table.weight: looked up with sparse=True, but the launcher can neither sum nor clip "
            "sparse gradients; remove sparse=True: dense "
            "gradients have the same numbers"
        ),
    ),
    (
        "Synced",
        "one",
        {},
        (
            "model: middle.norm: SyncBatchNorm averages over all processes, including "
            "those of other stages and of tp; use BatchNorm, whose statistics are those "
            "of each rank's own micro batch"
        ),
    ),
    (
        "Shared",
        "pp2",
        {"counts": True},
        (
            "model: the forward changes the buffer blocks.0.shared.calls, and stages 0 and 1 each have a "
            "copy; put all modules that use it on one stage"
        ),
    ),
    (
        "Shared",
        "interleaved",
        {"counts": True},
        (
            "model: the forward changes the buffer blocks.0.shared.calls, and stages 0 and 1 and 2 and 3 each "
            "have a copy; put all modules that use it on one stage"
        ),
    ),
    (
        "Shared",
        "zbv level2",
        {},
        (
            "model: blocks.0.shared and blocks.1.shared and blocks.2.shared and blocks.3.shared are one module, "
            "on stages 0 and 1 and 2 and 3, two of which are on one rank, and its weights are sharded (try: "
            "parallel.hsdp=null)"
        ),
    ),
    (
        "Frozen",
        "one",
        {"parts": ["a", "b", "c", "d"]},
        (
            "model: none of its parameters requires a gradient, so there is nothing to train; leave requires_grad on "
            "for parameters that should train"
        ),
    ),
    (
        "Strided",
        "pp2",
        {},
        (
            "model: b reads the memory layout of its input (is_contiguous, stride), but stages send a as a "
            "contiguous tensor, which it is not in one process; call .contiguous() before, or put both on one stage"
        ),
    ),
    (
        "StridedPair",
        "pp2",
        {},
        (
            "model: b reads the memory layout of its input (is_contiguous, stride), but stages send getitem_1 as a "
            "contiguous tensor, which it is not in one process; call .contiguous() before, or put both on one stage"
        ),
    ),
    (
        "Turned",
        "pp2",
        {},
        (
            "model: a passes complex numbers from one stage to another, but their gradients cannot be sent back; "
            "pass torch.view_as_real of it, or put "
            "both sides on one stage"
        ),
    ),
    (
        "Wrapped",
        "tp",
        {"operators": TP},
        (
            "parallel.operators.middle.lin: {weight: [tp, null]}: weight is cut over tp, but only input and "
            "output of a linear with a forward of its own can be cut"
        ),
    ),
    (
        "Hooked",
        "tp",
        {"operators": TP},
        (
            "model: middle.lin has backward hooks, which would see only a part of the gradient beside operators that "
            "are cut over tp; remove those from "
            "parallel.operators"
        ),
    ),
    (
        "Decayed",
        "tp",
        {"operators": TP},
        (
            "model: the parameter middle.lin.weight has hooks, and it is cut over tp, so "
            "the hooks would see only a part of the gradient; leave it out of "
            "parallel.operators\nmodel: the parameter middle.lin.bias has hooks, and it "
            "is cut over tp, so the hooks would see only a part of the gradient; leave "
            "it out of parallel.operators"
        ),
    ),
    (
        "Normed",
        "tp",
        {"operators": {"middle.new": {"weight": ["tp", None]}}},
        ("parallel.operators.middle.new: weight: no such key; the keys are input, output, in, out, layout and bias"),
    ),
]

ALONE = {
    "replicas": "launch.nproc=1 parallel.grid.dp_replicate=1",
    "level1": "launch.nproc=1 parallel.hsdp=null",
    "pp2 level2": "launch.nproc=2 parallel.hsdp=null",
}
REFUSED += [
    (
        name,
        layout,
        settings,
        (
            "model: the forward changes the buffer middle.mean from rank-local data and then reads it: each of 2 "
            f"data-parallel ranks would train another model; use one data-parallel rank (try: {ALONE[layout]})"
        ),
    )
    for name, layout, settings in (
        *(
            ("Looks", "replicas", {"how": how})
            for how in ("", "before", "after", "number", "branch", "nonzero", "size", "rebound")
        ),
        ("Looks", "pp2 level2", {"how": "before"}),
        ("Looks", "pp2 level2", {"how": "rebound"}),
        ("Inside", "level1", {}),
        ("Centered", "pp2 level2", {}),
    )
]
REFUSED += [
    (
        "Replaced",
        layout,
        {},
        (
            "model: the forward changes the parameter middle.lin.weight in place, and "
            "the backward of another micro batch still needs the old values; compute "
            "with a copy, weight.clone()"
        ),
    )
    for layout in ("pp2", "zbv")
]


@pytest.mark.parametrize(("name", "layout", "settings", "text"), REFUSED)
def test_side_effects_that_a_layout_would_lose_are_refused_with_the_reason(name, layout, settings, text):
    with pytest.raises(RequestError) as caught:
        plan_job(net(name, layout, **settings))
    assert str(caught.value) == text


CURED = [
    ("Decayed", "zbv", {"pipeline": PP | {"scheduler": "1f1b"}}),
    ("Penalized", "zbh1", {"pipeline": PP | {"scheduler": "1f1b"}}),
    ("Penalized", "level1", {"pipeline": PP | {"stages": 1}, "hsdp": None}),
    ("Listing", "level3", {"hsdp": None}),
    ("Shared", "zbv level2", {"pipeline": PP | {"scheduler": "zero_bubble_v"}, "hsdp": None}),
]


@pytest.mark.parametrize(("name", "layout", "parallel"), CURED)
def test_the_cures_for_side_effects_are_planned(name, layout, parallel):
    plan_job(net(name, layout, more={"parallel": parallel}))


@pytest.mark.parametrize(("name", "layout"), [("Decayed", "replicas"), ("Centered", "level1"), ("Looks", "pp2 level2")])
def test_one_data_parallel_rank_is_what_is_pasted(name: str, layout: str) -> None:
    asked = net(name, layout, **({"how": "before"} if name == "Looks" else {}))
    with pytest.raises(RequestError) as caught:
        plan_job(asked)
    raw = asked.model_dump(exclude_unset=True, by_alias=True)
    for word in {w for p in caught.value.problems for w in p.cure.split()}:
        *keys, last = word.partition("=")[0].split(".")
        at = raw
        for key in keys:
            at = at.setdefault(key, {})
        at[last] = yaml.safe_load(word.partition("=")[2])
    assert plan_job(Job.model_validate(raw)).sizes.replicas == 1


@pytest.mark.parametrize(("step", "told"), [(Train(), True), (Certify(), True), (Calibrate(), False)])
def test_a_model_that_learns_nothing_is_refused_where_it_is_trained(step: Any, told: bool) -> None:
    """``calibrate`` does not train it: it trains the launcher's own models."""
    job = net("Teacher", "one").model_copy(update={"steps": {"only": step}})
    weight = Param("weight", TensorSpec((1,), "float32"), "weight")
    skeleton = ModelStructure(modules=(), params=(weight,), containers=frozenset())
    assert bool([*untrained(job, skeleton, Graph((), detached=True))]) == told


def test_weights_that_the_forward_changes_stay_whole_and_the_plan_says_so():
    plan = plan_job(net("Teacher", "level3"))
    assert [p.name for p in plan.params if p.name.startswith("middle") and not p.sharded] == [
        "middle.slow.weight", "middle.slow.bias",
    ]  # fmt: skip
    assert [str(n) for n in plan.notes if "changes" in n.text] == [
        "parallel.hsdp middle.slow.weight, middle.slow.bias stay unsharded: the forward changes them"
    ]
