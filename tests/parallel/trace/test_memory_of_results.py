"""Code that changes a module's result, or finds more than tensors in it, is refused where ranks would differ."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.trace.memory_of_results import DATACLASSES
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, own

STAGES: dict[str, Any] = {"pipeline": {"stages": 2, "micro_batch_num": 2, "stage_config": {"[ab]": 0, "[cd]": 1}}}
REPLICAS: dict[str, Any] = {"grid": {"dp_replicate": 2}}
NEW = "but FSDP2 passes new tensors to modules with sharded weights"
NULL = ", or shard nothing (try: parallel.hsdp=null)"
SHARES = (
    "model: b: its result shares memory with its input, or with another of its results, and one of them is changed "
    f"in place later, {NEW}, and their results are copied; return a copy (x.clone()), or create a new tensor in "
    f"place of the change{NULL}"
)
NAMED = (
    "model: b: an attribute is set on its input, by its own forward or later on a result that is this input, "
    f"{NEW}; return the value that the attribute has{NULL}"
)
SETS = (
    "model: b: its forward changes its input in place, which FSDP2 does not allow for modules with sharded weights; "
    f"create a new tensor (inplace=False, x = x + y){NULL}"
)
OPAQUE = (
    "model: b: its forward returns an object ({}). FSDP2 does not find the tensors or modules in it, so level3 would "
    "not gather the weights again for them; return a tuple, list or dictionary of tensors, or keep the weights "
    "gathered (try: parallel.hsdp.optimizer_level=level2)"
)
LEFT = (
    "model: b: its forward returns no tensor that needs a gradient, but leaves one elsewhere, such as in an attribute. "
    "FSDP2 does not find the tensors in it, so level3 would not gather the weights again for them; return a tuple, "
    "list or dictionary of tensors, or keep the weights gathered (try: parallel.hsdp.optimizer_level=level2)"
)
SPARSE = (
    "model: c: called with a sparse tensor that needs a gradient, which FSDP2 cannot pass to modules with sharded "
    f"weights; pass its indices and values, or a dense tensor{NULL}"
)
CHANGED = ("Changes", "ChangesInput", "ChangesByData", "ReplacesData", "ChangesView", "ChangesTwin")
OBJECTS = {
    "InNamespace": "SimpleNamespace",
    "InSlots": "Slots",
    "InLazy": "Lazy",
    "InDistribution": "Normal",
    "InClosure": "function",
}
REFUSED = {
    **dict.fromkeys(CHANGED, SHARES),
    "Notes": NAMED,
    "NotesLater": NAMED,
    "Sets": SETS,
    **{net: OPAQUE.format(kind) for net, kind in OBJECTS.items()},
    "InAttribute": LEFT,
    "SparseToModule": SPARSE,
}


def net(name: str, parallel: dict[str, Any], **changes: Any) -> Job:
    return own(f"result_nets.{name}", [6], stages=1, parallel=parallel, **changes)


def sharded(level: str) -> dict[str, Any]:
    return {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": level}}


def refusal(job: Job) -> str:
    with pytest.raises(RequestError) as refused:
        plan_job(job)
    return str(refused.value)


@pytest.mark.parametrize("name", list(REFUSED))
def test_results_that_share_memory_are_refused_with_sharded_weights(name: str) -> None:
    assert refusal(net(name, sharded("level3"))) == REFUSED[name]


@pytest.mark.parametrize("name", ["Changes", "NotesLater", "Sets", "SparseToModule"])
def test_gathered_weights_do_not_help_where_inputs_are_new_tensors(name: str) -> None:
    assert refusal(net(name, sharded("level2"))) == REFUSED[name]


@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
@pytest.mark.parametrize("name", ["InDataclass", "InNestedDataclass"])
def test_a_dataclass_is_exact_over_shards(name: str, level: str) -> None:
    if level == "level3" and not DATACLASSES:
        assert refusal(net(name, sharded(level))) == OPAQUE.format("Fields")
    else:
        assert_parity(net(name, sharded(level)))


@pytest.mark.parametrize("name", [*OBJECTS, "InAttribute"])
def test_an_object_is_exact_where_weights_stay_gathered(name: str) -> None:
    assert_parity(net(name, sharded("level2")))


@pytest.mark.parametrize("name", [*CHANGED, "Notes", "NotesLater", "Sets", "SparseToModule"])
def test_results_that_share_memory_are_exact_on_replicas(name: str) -> None:
    assert_parity(net(name, REPLICAS))


@pytest.mark.parametrize(
    "name", ["ChangesHalf", "ChangesCopy", "ChangesOwn", "Reads", "Halves", "BesideObject", "Sparse"]
)
def test_a_sibling_is_exact_over_shards(name: str) -> None:
    assert_parity(net(name, sharded("level3")))


@pytest.mark.parametrize("name", ["Halves", "Sets"])
def test_a_module_that_changes_its_input_past_autograd_is_not_recomputed(name: str) -> None:
    assert refusal(net(name, {"recompute": {"modules": ["a", "b"]}})) == (
        "parallel.recompute.modules: b cannot be recomputed in the backward: it changes an input in place (try: "
        "'parallel.recompute.modules=[a]')"
    )


def test_stages_do_not_send_sparse_tensors() -> None:
    assert refusal(net("SparseToModule", STAGES)) == (
        "parallel.pipeline.stage_config: 'b' on stage 0 passes a value that is not a dense tensor to 'c' on stage 1; "
        "put both on one stage"
    )
