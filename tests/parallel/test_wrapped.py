"""The automatic choices for a model whose layers are inside another module, and for a model that reads data."""

from __future__ import annotations

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.plan import Plan
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, own

TOKENS = ["int64", 5]


def auto(plan: Plan) -> list[str]:
    return [n.text for n in plan.notes if n.key == "parallel.pipeline.stage_config"]


def test_layers_inside_a_module_are_spread_over_the_stages():
    plan, _ = assert_parity(own("wrapped_nets.Wrapped", TOKENS, stages=2))
    blocks = [f"m.body.layers.{n}" for n in range(4)]
    assert [s.modules for s in plan.stages] == [
        ("m.body.embed", *blocks[:3]), (*blocks[3:], "m.body.norm", "m.head"),
    ]  # fmt: skip
    assert auto(plan) == [
        "auto -> the stages above: balanced by flops and bytes written, the slowest rank 14.8% above the mean"
    ]


def test_layers_that_cannot_be_cut_stay_in_one_piece_and_the_plan_says_why():
    plan, _ = assert_parity(own("wrapped_nets.WrappedLooking", TOKENS, stages=2))
    assert [s.modules for s in plan.stages] == [("m.body",), ("m.head",)]
    assert auto(plan) == [
        (
            "auto: m.body stays in one piece, because it cannot be cut: cannot trace the "
            "code between the named modules of WrappedLooking in m.body (Looking) (wrapped_nets.py:38): its "
            "Python looks at data; name a larger module in stage_config, so that this "
            "code runs inside it"
        ),
        "auto -> the stages above: balanced by flops and bytes written, the slowest rank 41.2% above the mean",
    ]


def level3(net: str, stages: int) -> Job:
    hsdp = {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}
    pipeline = {"stages": stages, "micro_batch_num": 2}
    return own(f"wrapped_nets.{net}", TOKENS, stages=stages, parallel={"pipeline": pipeline, "hsdp": hsdp})


@pytest.mark.parametrize("net", ["Wrapped", "WrappedLooking"])
@pytest.mark.parametrize("stages", [1, 2])
def test_each_layer_is_gathered_alone_wherever_it_lies(net, stages):
    plan = plan_job(level3(net, stages))
    assert [m for g in plan.groups for m in g.modules if "layers" in m] == [f"m.body.layers.{n}" for n in range(4)]


def test_layers_inside_a_module_that_looks_at_its_data_train_as_in_one_process():
    assert_parity(level3("WrappedLooking", 2), parts=4)


def test_a_model_that_looks_at_its_data_is_planned_as_one_that_does_not():
    looking, blind = (
        plan_job(own("wrapped_nets.Weighed", [6], stages=1, model={
            "_target_": "tests.parallel.wrapped_nets.Weighed", "look": look}))
        for look in (True, False)
    )  # fmt: skip
    assert [s.flops for s in looking.stages] == [s.flops for s in blind.stages]
    assert looking.estimate.memory == blind.estimate.memory
    assert looking.groups == blind.groups


OPERATORS = {
    "m.body.embed": {"weight": ["tp", None]}, "m.head": {"weight": ["tp", None]},
    "m.body.layers.*.up": {"weight": ["tp", None]}, "m.body.layers.*.down": {"weight": [None, "tp"]},
}  # fmt: skip


def spread(net: str, stages: int) -> Job:
    pipeline = {"stages": stages, "micro_batch_num": 2}
    return own(f"wrapped_nets.{net}", TOKENS, stages=stages, parallel={
        "pipeline": pipeline, "grid": {"tp": 2}, "operators": OPERATORS})  # fmt: skip


def test_operators_of_a_model_that_looks_at_what_is_always_the_same_are_spread_as_of_one_that_does_not():
    for stages in (1, 2):
        looking, blind = (plan_job(spread(net, stages)) for net in ("WrappedCounting", "Wrapped"))
        assert looking.operators == blind.operators
    assert_parity(spread("WrappedCounting", 2), parts=2)


@pytest.mark.parametrize("stages", [1, 2])
def test_operators_of_a_model_that_looks_at_its_inputs_are_refused_for_only_one_of_its_ways_was_followed(stages):
    with pytest.raises(RequestError) as caught:
        plan_job(spread("WrappedLooking", stages))
    assert str(caught.value) == (
        "parallel.operators: m.body branches on the values of its inputs or weights; "
        "a branch cannot be traced next to operators that are cut over tp"
    )
