"""A module keeps its class in every layout: a forward that looks at it trains the numbers of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from launcher.job.schema.job import Job
from launcher.parallel import parallelize
from launcher.plan.plan import Plan
from launcher.planner.plan_job import builder, plan_job
from launcher.runtime.cluster.world import World
from tests.parallel.class_nets import LAYERS, Classes, Named
from tests.parity import assert_parity, own
from tests.ranks import on_ranks

CUT = {"a": 0, "b": 1, "head": 1}
LEVEL3 = {"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}
PIPE = {"stages": 2, "micro_batch_num": 2, "stage_config": CUT}
LAYOUTS = {
    "level1": {"hsdp": {**LEVEL3, "optimizer_level": "level1"}},
    "level2": {"hsdp": {**LEVEL3, "optimizer_level": "level2"}},
    "level3": {"hsdp": LEVEL3},
    "level3 recompute": {"hsdp": LEVEL3, "recompute": {"modules": ["b"]}},
    "pp2": {"pipeline": PIPE},
    "pp2 level1": {"pipeline": PIPE, "hsdp": {**LEVEL3, "optimizer_level": "level1"}},
    "pp2 level3": {"pipeline": PIPE, "hsdp": LEVEL3},
    "zero bubble level2": {
        "pipeline": {**PIPE, "scheduler": "zero_bubble_h1"}, "hsdp": {**LEVEL3, "optimizer_level": "level2"},
    },
    "replicas": {"grid": {"dp_replicate": 2}},
}  # fmt: skip
MODELS = {**{layer: {"layer": layer} for layer in LAYERS}, "containers": {}}


def job(model: str, layout: str) -> Job:
    name = "Classes" if MODELS[model] else "Containers"
    target = {"_target_": f"tests.parallel.class_nets.{name}", **MODELS[model]}
    return own(f"class_nets.{name}", [6], stages=1, model=target, parallel=LAYOUTS[layout], train__batch_size=8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_forward_that_looks_at_classes_trains_as_in_one_process(model: str, layout: str) -> None:
    assert_parity(job(model, layout))


def classes(world: World, j: Job, plan: Plan) -> list[str]:
    net = parallelize(builder(j), plan)
    model = net.stages[0]
    assert type(model) is Classes
    assert type(model.a) is type(model.b) is Named
    assert type(model.head) is nn.Linear
    assert not any(isinstance(m, FSDPModule) for m in net.modules())
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model.a)
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    return [type(m).__name__ for m in net.modules()]


def test_modules_with_shards_keep_their_class_and_are_not_copied() -> None:
    j = job("named", "level3")
    first, second = on_ranks(2, classes, j, plan_job(j))
    assert first == second
    assert first[2:] == ["Classes", "Named", "Linear", "Named", "Linear", "Linear"]
