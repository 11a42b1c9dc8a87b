"""What a model finds by identity is found in every layout, or the plan refuses the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.local_tensors import local
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from launcher.runtime.cluster.world import World
from tests.extras.device_matrix.run.test_strategy_files import with_parallel
from tests.parallel.test_classes import LAYOUTS
from tests.parity import assert_parity, build, own, step
from tests.ranks import on_ranks

HALF = {"bf16": {}}


def keyed(layer: str, layout: str, **changes: Any) -> Job:
    model = {"_target_": "tests.parallel.keyed_nets.Keyed", "layer": layer}
    parallel = LAYOUTS.get(layout, {})
    return own("keyed_nets.Keyed", [6], stages=1, model=model, parallel=parallel, train__batch_size=8, **changes)


@pytest.mark.parametrize("layer", ["by module", "weak key", "weak set"])
@pytest.mark.parametrize("layout", ["one", "level1", "level3", "pp2", "level3 recompute"])
def test_what_belongs_to_a_module_is_found_by_its_identity(layer: str, layout: str) -> None:
    assert_parity(keyed(layer, layout))


@pytest.mark.parametrize("layer", ["by module", "weak key", "weak set"])
def test_searched_operators_are_those_of_the_path_that_the_model_takes(layer: str) -> None:
    j = Job.model_validate(keyed(layer, "one").model_dump(by_alias=True) | {"launch": {"nproc": 2}})
    assert_parity(with_parallel(j, mode="recursive_programming"))


@pytest.mark.parametrize(("layer", "place"), [("by tensor", "scales"), ("list", "scaled")])
@pytest.mark.parametrize("layout", ["one", "level3"])
def test_the_id_of_a_tensor_is_refused(layer: str, place: str, layout: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(keyed(layer, layout))
    text = f"a.{place} contains the id() of a.inner.weight, but the launcher replaces that tensor with another one"
    assert refused.value.problems[0].text == f"{text}; use its name instead"


@pytest.mark.parametrize("layout", ["level1", "level3", "pp2 level1"])
def test_the_version_of_a_sharded_weight_is_refused(layout: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(keyed("version", layout))
    (problem,) = refused.value.problems
    assert problem.text.startswith(
        "the forward reads the version of a.inner.weight, b.inner.weight to notice updates, but each step "
        "gathers a sharded weight into the same tensor, whose version stays"
    )


def test_the_version_of_a_copy_in_half_precision_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(keyed("version", "one", train__precision="bf16"))
    (problem,) = refused.value.problems
    assert "in half precision each step computes with a new copy of the weight" in problem.text
    assert problem.cure == "train.precision=fp32"


@pytest.mark.parametrize("layout", ["one", "pp2", "replicas"])
def test_the_version_of_a_full_weight_changes_with_each_update(layout: str) -> None:
    assert_parity(keyed("version", layout))


def test_searched_operators_of_code_that_asks_for_the_device_are_refused() -> None:
    j = own("keyed_nets.Device", [8], stages=1, train__batch_size=8)
    j = Job.model_validate(j.model_dump(by_alias=True) | {"launch": {"nproc": 2}})
    with pytest.raises(RequestError) as refused:
        plan_job(with_parallel(j, mode="recursive_programming"))
    assert "the model does more than operators do: output 0 differs" in refused.value.problems[0].text


def test_a_module_that_reads_a_version_is_not_recomputed() -> None:
    j = keyed("version", "one")
    with pytest.raises(RequestError) as refused:
        plan_job(with_parallel(j, recompute={"modules": ["a"]}))
    (problem,) = refused.value.problems
    assert "a cannot be recomputed in the backward: it reads the version of a.inner.weight" in problem.text


def made(cls: str, layout: str, **arguments: Any) -> Job:
    model = {"_target_": f"tests.parallel.keyed_nets.{cls}", **arguments}
    parallel = LAYOUTS.get(layout, {})
    return own(f"keyed_nets.{cls}", [6], stages=1, model=model, parallel=parallel, train__batch_size=8)


ARRAYS = {"global": "tests.parallel.keyed_nets.TABLE", "class": "tests.parallel.keyed_nets.InAnArray.OF_CLASS"}


@pytest.mark.parametrize("kind", ["buffer", "attribute", "parameter", "as_tensor", "array", "global", "class"])
@pytest.mark.parametrize("layout", ["one", "level3"])
def test_an_array_that_changes_a_tensor_is_refused(kind: str, layout: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(made("InAnArray", layout, kind=kind, changes=True))
    place = ARRAYS.get(kind, "table")
    text = f"the forward changes {place}, in whose memory the constructor made scale, but the launcher gives"
    assert refused.value.problems[0].text == f"{text} that tensor memory of its own; change the tensor instead"


@pytest.mark.parametrize("kind", ["buffer", "as_tensor", "array", "global", "class"])
@pytest.mark.parametrize("layout", ["one", "level3"])
def test_an_array_that_is_only_read_is_not_refused(kind: str, layout: str) -> None:
    assert_parity(made("InAnArray", layout, kind=kind, changes=False))


@pytest.mark.parametrize("kind", ["itself", "view"])
@pytest.mark.parametrize("layout", ["one", "level3"])
def test_a_global_tensor_that_changes_a_buffer_is_refused(kind: str, layout: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(made("InATensor", layout, kind=kind))
    text = "the forward changes tests.parallel.keyed_nets.VALUES, in whose memory the constructor made scale, but"
    own = "the launcher gives that tensor memory of its own"
    assert refused.value.problems[0].text == f"{text} {own}; change the tensor instead"


@pytest.mark.parametrize("kind", ["parameter", "changed"])
@pytest.mark.parametrize("layout", ["one", "level3"])
def test_a_global_tensor_that_would_miss_updates_is_refused(kind: str, layout: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(made("InATensor", layout, kind=kind))
    text = "the constructor made scale in the memory of tests.parallel.keyed_nets.VALUES, but the launcher gives that"
    why = "tensor memory of its own, so code that reads tests.parallel.keyed_nets.VALUES would not see its updates"
    assert refused.value.problems[0].text == f"{text} {why}; read scale instead, or make it from a copy"


@pytest.mark.parametrize("kind", ["first values", "read"])
@pytest.mark.parametrize("layout", ["one", "level3"])
def test_a_global_tensor_that_keeps_its_values_is_not_refused(kind: str, layout: str) -> None:
    assert_parity(made("InATensor", layout, kind=kind))


@pytest.mark.parametrize("kind", ["number", "tensor", "data"])
def test_statistics_in_a_global_tensor_are_refused_over_replicas(kind: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(made("Statistics", "replicas", kind=kind))
    (problem,) = refused.value.problems
    place = f"tests.parallel.keyed_nets.{'MEAN' if kind == 'number' else 'MEANS'}"
    assert problem.text.startswith(f"the forward changes {place} from rank-local data and then reads it")


@pytest.mark.parametrize("kind", ["number", "tensor", "data"])
def test_statistics_in_a_global_tensor_are_exact_on_one_rank(kind: str) -> None:
    assert_parity(made("Statistics", "one", kind=kind))


SAVING = {
    "one": {},
    "together": {"pipeline": {"stages": 2, "micro_batch_num": 2, "stage_config": {"a": 0, "b": 0, "head": 1}}},
    "apart": {"pipeline": {"stages": 2, "micro_batch_num": 2, "stage_config": {"a": 0, "b": 1, "head": 1}}},
}


@pytest.mark.parametrize("layout", SAVING)
def test_a_change_by_data_of_what_another_stage_has_saved_is_refused(layout: str) -> None:
    j = own("keyed_nets.Saving", [6], stages=1, parallel=SAVING[layout], train__batch_size=8)
    if layout != "apart":
        assert_parity(j)
        return
    with pytest.raises(RequestError) as refused:
        plan_job(j)
    assert "b changes a by .data, which autograd does not see" in refused.value.problems[0].text


def test_a_buffer_that_is_a_copy_of_a_weight_is_no_alias_of_it_under_searched_operators() -> None:
    j = own("keyed_nets.Remembering", [8], stages=1, train__batch_size=8)
    j = Job.model_validate(j.model_dump(by_alias=True) | {"launch": {"nproc": 2}})
    j = with_parallel(j, mode="recursive_programming")
    assert all(on_ranks(2, buffer_after_a_step, j, plan_job(j)))


def buffer_after_a_step(world: World, j: Job, plan: Plan) -> bool:
    """Whether the buffer still has the weight of the forward after the weight has been updated."""
    par, pipe = build(world, j, plan)
    weight = {placed.name: local(t) for placed, t in par.named()}["a.lin.weight"]
    before = weight.detach().clone()
    step(j, par, pipe)
    with torch.no_grad():
        weight.add_(1)
    return torch.equal({placed.name: local(t) for placed, t in par.named()}["a.before"], before)
