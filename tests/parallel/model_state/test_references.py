"""Tensors of a model that something else refers to are refused with the place, or planned."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.model_state.references import inside
from launcher.planner.plan_job import plan_job
from tests.parallel.reference_nets import WAYS
from tests.parity import assert_parity, own

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"pipeline": {"micro_batch_num": 3}},
    "pp2": {"pipeline": {"stages": 2, "micro_batch_num": 3}},
    "level3": {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}},
}


def net(name: str, layout: str, settings: dict[str, Any]) -> Job:
    model = {"_target_": "tests.parallel.reference_nets.Net", "middle": name, **settings}
    return own("reference_nets.Net", [6], stages=1, model=model, parallel=LAYOUTS[layout])


ITSELF = (
    "holds the parameter middle.lin.weight, but the launcher replaces that tensor with another one; read the parameter "
    "from its module each time instead"
)
HIDDEN = (
    "model: middle.kept is or holds the module Linear, which is not a submodule, so "
    "the launcher cannot initialize or move its tensors; make it an attribute of "
    "a module, or put it in an nn.ModuleList or nn.ModuleDict"
)
ARRAY = (
    "model: middle.seen is a numpy array that shares memory with middle.lin.weight, but the array would no longer "
    "see its updates; compute it from middle.lin.weight in the forward"
)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Array", {}, ARRAY),
    ("Array", {"in_memory": True}, ARRAY),
    *(("Held", {"way": way}, f"model: middle.kept {ITSELF}") for way in WAYS),
    ("Hooked", {}, f"model: a hook of middle {ITSELF}"),
    ("Registered", {}, f"model: tests.parallel.reference_nets.KEPT {ITSELF}"),
    ("Hidden", {}, HIDDEN),
    ("Hidden", {"way": "slots"}, HIDDEN),
    (
        "Prior",
        {},
        (
            "model: middle.prior keeps tensors in a Normal, which the launcher can "
            "neither fill with values nor move to a device; make each a buffer with register_buffer"
        ),
    ),
    (
        "Scripted",
        {},
        (
            "model: middle.lin is TorchScript, whose weights cannot be replaced by shards; build it from the "
            "original module"
        ),
    ),
    (
        "Flat",
        {},
        (
            "model: middle.square shares memory with middle.flat, and would no longer see its updates; compute it from "
            "middle.flat in the forward"
        ),
    ),
    (
        "Scaled",
        {},
        (
            "model: middle.twice was computed from weights in the constructor, so no "
            "gradient flows through it; compute it in the forward"
        ),
    ),
    (
        "Twice",
        {},
        (
            "model: middle.p, middle.q share memory, but ranks and checkpoints keep each in memory of its own; "
            "keep one tensor, under one name or several, and "
            "create views of it in the forward"
        ),
    ),
    (
        "Follows",
        {},
        (
            "model: middle.lin.weight, middle.same share memory, but ranks and checkpoints keep each in memory "
            "of its own; keep one tensor, under one name or "
            "several, and create views of it in the forward"
        ),
    ),
    (
        "Follows",
        {"persistent": False},
        (
            "model: middle.same shares memory with middle.lin.weight, and would no longer see its updates; compute it "
            "from middle.lin.weight in the forward"
        ),
    ),
    (
        "Buffers",
        {"changes": True},
        (
            "model: the forward changes middle.both, but middle.first, with which it shares memory, "
            "would no longer see the change; keep one tensor, and take views of it "
            "in the forward"
        ),
    ),
    (
        "Marked",
        {"reads": True},
        (
            "model: the forward reads the attribute scale of middle.lin.weight, which is lost when the tensor is "
            "placed; store it on the module"
        ),
    ),
    (
        "Marked",
        {"reads": True, "buffer": True},
        (
            "model: the forward reads the attribute scale of middle.table, which is lost when the tensor is placed; "
            "store it on the module"
        ),
    ),
    (
        "Kind",
        {},
        (
            "model: middle.lin.weight is a Weight, a class that is lost when the tensor is sharded; make it an "
            "nn.Parameter"
        ),
    ),
    (
        "Global",
        {"early": True},
        (
            "model: the forward uses a tensor of shape (6,) that is neither a parameter "
            "nor a buffer of the model and was not created in the forward: ranks have no "
            "values for it; register it as a buffer"
        ),
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "settings", "text"), REFUSED)
def test_references_to_tensors_of_a_model_are_refused_with_the_place(name, settings, text, layout):
    with pytest.raises(RequestError) as caught:
        plan_job(net(name, layout, settings))
    assert str(caught.value) == text


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Stateless", {}),
        ("Twice", {"parts": True}),
        ("Buffers", {"changes": False}),
        ("Marked", {"reads": False}),
        ("Cached", {}),
        ("Cached", {"early": True}),
        ("Made", {}),
        ("Normed", {}),
        ("Recurrent", {}),
        ("Pruned", {}),
        ("Tied", {}),
        ("Array", {"copied": True}),
    ],
)
def test_harmless_references_to_tensors_of_a_model_are_planned(name, settings, layout):
    plan_job(net(name, layout, settings))


@pytest.mark.parametrize("layout", ["one", "level3"])
def test_a_table_that_the_forward_keeps_in_a_variable_is_exact_in_one_stage(layout):
    assert_parity(net("Global", layout, {}))


def test_a_table_that_the_forward_keeps_in_a_variable_is_refused_on_stages():
    with pytest.raises(RequestError) as caught:
        plan_job(net("Global", "pp2", {}))
    assert str(caught.value) == (
        "model: the forward stores tensors in tests.parallel.reference_nets.TABLES, where ranks would find "
        "the plan's tensors without values; make them buffers, or compute them each time"
    )


def test_a_plan_leaves_nothing_without_numbers_in_a_cache():
    from tests.parallel.reference_nets import table

    plan_job(net("Cached", "pp2", {"early": True}))
    assert not table(6).is_meta


def test_the_known_modules_are_not_copied_for_each_attribute() -> None:
    class Known:
        """Supports ``in`` but not iteration: iterating for each attribute would take modules squared."""

        def __contains__(self, key: object) -> bool:
            return key == id(known)

    known, new = nn.Linear(1, 1), nn.Identity()
    assert {*inside([known, new], Known())} == {known, new}


@pytest.mark.parametrize("early", [False, True])
def test_an_optimizer_that_reads_an_attribute_of_a_weight_is_refused(early):
    model = {"_target_": "tests.parallel.reference_nets.Net", "middle": "Marked", "reads": False}
    optim = {"_target_": "tests.optim.theirs.Scaled", "early": early}
    job = own("reference_nets.Net", [6], stages=1, model=model, parallel=LAYOUTS["one"], optim=optim)
    with pytest.raises(RequestError) as refused:
        plan_job(job)
    assert str(refused.value) == (
        "optim._target_: tests.optim.theirs.Scaled reads the attribute scale of middle.lin.weight, which is lost when "
        "the tensor is placed; give weights their own settings by name, with optim.groups of a built-in optimizer"
    )
