"""A module that uses more of its input than the numbers is refused where a layout passes only numbers."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from tests.parity import own

STAGES: dict[str, Any] = {"pipeline": {"stages": 2, "micro_batch_num": 2, "stage_config": {"[ab]": 0, "[cd]": 1}}}
TOGETHER: dict[str, Any] = {"pipeline": {"stages": 2, "micro_batch_num": 2, "stage_config": {"a": 0, "[bcd]": 1}}}
SHARDS: dict[str, Any] = {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}}
REPLICAS: dict[str, Any] = {"grid": {"dp_replicate": 2}}
HOWS = "attribute", "changed in place", "class", "leaf", "node", "same", "view"
ASKS = "a tensor's class, attributes, is_leaf, grad_fn, whether it is a view or the same object as another"


def net(how: str, parallel: dict[str, Any]) -> Job:
    model = {"_target_": "tests.parallel.asking_nets.Asks", "how": how}
    return own("asking_nets.Asks", [6], stages=1, model=model, parallel=parallel)


def planned(how: str, parallel: dict[str, Any]) -> Plan | str:
    try:
        return plan_job(net(how, parallel))
    except RequestError as refused:
        return str(refused)


@pytest.mark.parametrize("how", ["attribute", "class", "leaf", "node", "view"])
def test_a_module_that_depends_on_the_identity_of_inputs_is_refused_behind_a_stage(how: str) -> None:
    assert planned(how, STAGES) == (
        f"model: c computes other results for a plain copy of b: it depends on more than the values ({ASKS}), but "
        "stages send only the values; pass what it needs as an argument, or put both on one stage"
    )


@pytest.mark.parametrize("how", ["attribute", "same"])
def test_a_module_that_depends_on_the_identity_of_inputs_is_refused_with_sharded_weights(how: str) -> None:
    assert planned(how, SHARDS) == (
        f"model: c: depends on more than the values of its inputs ({ASKS}), but FSDP2 passes new tensors to modules "
        "with sharded weights; pass what it needs as an argument, or shard nothing (try: parallel.hsdp=null)"
    )


@pytest.mark.parametrize(
    ("how", "parallel"),
    [
        *((how, TOGETHER) for how in HOWS),
        *((how, REPLICAS) for how in HOWS),
        *((how, SHARDS) for how in ("class", "leaf", "node", "view")),
        *((how, STAGES) for how in ("changed in place", "same")),
    ],
)
def test_a_module_that_depends_on_the_identity_of_inputs_is_planned_if_it_stays(
    how: str, parallel: dict[str, Any]
) -> None:
    assert isinstance(planned(how, parallel), Plan)


@pytest.mark.parametrize(
    ("how", "listed"),
    [("parameters", "2 of its 6 parameters"), ("named_parameters", "2 of its 6 parameters"),
     ("named_buffers", "0 of its 3 buffers"), ("named_modules", "3 of its 5 modules")],
)  # fmt: skip
def test_a_model_that_lists_only_some_of_what_it_has_is_refused(how: str, listed: str) -> None:
    model = {"_target_": "tests.parallel.asking_nets.Hides", "how": how}
    with pytest.raises(RequestError) as refused:
        plan_job(own("asking_nets.Hides", [6], stages=1, model=model))
    why = "but the launcher uses all that torch itself would list; let it list all"
    assert f"model: Hides.{how}() lists {listed}, {why}" in str(refused.value)


def test_a_model_with_such_a_method_that_lists_all_is_planned() -> None:
    model = {"_target_": "tests.parallel.asking_nets.Hides", "how": "nothing"}
    assert isinstance(plan_job(own("asking_nets.Hides", [6], stages=1, model=model)), Plan)


def test_weights_that_are_fused_for_an_evaluation_are_refused_on_shards() -> None:

    def fuses(parallel: dict[str, Any], **more: Any) -> Job:
        steps = {"train": {"kind": "train"}}
        return own("asking_nets.Fuses", [6], stages=1, parallel=parallel, steps=steps, **more)

    with pytest.raises(RequestError) as refused:
        plan_job(fuses(SHARDS, train__eval_every=1))
    assert str(refused.value) == (
        "model: eval() computes b.both from weights, but at train.eval_every each rank has only its shards of them; "
        "compute it in the forward, or shard nothing (try: parallel.hsdp=null)"
    )
    assert isinstance(plan_job(fuses(SHARDS, train__eval_every=None)), Plan)
    assert isinstance(plan_job(fuses(REPLICAS, train__eval_every=1)), Plan)
