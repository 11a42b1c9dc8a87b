"""A model that reads a rank, a world size or a random stream of its process is refused on several ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.model_state.python_state import INSTALLED
from launcher.parallel.trace.torch_distributed_reads import ask, world_reads
from launcher.planner.plan_job import plan_job
from tests.parity import own

REPLICAS: dict[str, Any] = {"grid": {"dp_replicate": 2}}
STAGES: dict[str, Any] = {"pipeline": {"stages": 2, "micro_batch_num": 2}}


def net(how: str, parallel: dict[str, Any], looks: bool = False) -> Job:
    model = {"_target_": "tests.parallel.world_nets.Net", "how": how, "looks": looks}
    return own("world_nets.Net", [6], stages=1, model=model, parallel=parallel)


def built(how: str, parallel: dict[str, Any]) -> Job:
    model = {"_target_": "tests.parallel.world_nets.ReadsWorldInConstructor", "how": how}
    return own("world_nets.ReadsWorldInConstructor", [6], stages=1, model=model, parallel=parallel)


TEXT = (
    "model: middle asks for {} in its forward, but 2 ranks get another answer than one process: they would train "
    "another model; remove it: the "
    "launcher combines samples, gradients and losses itself"
)
DRAWS = (
    "model: the forward draws numbers from Python's or numpy's random stream, "
    "which differs on every rank; draw with torch, inside a module"
)


@pytest.mark.parametrize("parallel", [REPLICAS, STAGES], ids=["replicas", "stages"])
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("how", ["size", "rank", "reduce", "environment", "bytes"])
def test_a_model_that_queries_the_world_is_refused_on_several_ranks(how, looks, parallel):
    read = how in ("environment", "bytes")
    what = "the environment variable WORLD_SIZE" if read else "torch.distributed.is_initialized()"
    with pytest.raises(RequestError) as refused:
        plan_job(net(how, parallel, looks))
    assert str(refused.value) == TEXT.format(what)


@pytest.mark.parametrize("parallel", [REPLICAS, STAGES], ids=["replicas", "stages"])
@pytest.mark.parametrize("how", ["size", "rank", "reduce", "environment"])
def test_a_query_of_the_world_in_a_later_call_is_refused_on_several_ranks(how, parallel):
    model = {"_target_": "tests.parallel.world_nets.LateNet", "how": how}
    what = "the environment variable WORLD_SIZE" if how == "environment" else "torch.distributed.is_initialized()"
    with pytest.raises(RequestError, match=f"asks for {re.escape(what)} in its forward, but 2 ranks"):
        plan_job(own("world_nets.LateNet", [6], stages=1, model=model, parallel=parallel))


@pytest.mark.parametrize("parallel", [REPLICAS, STAGES], ids=["replicas", "stages"])
@pytest.mark.parametrize("how", ["size", "rank", "environment"])
def test_a_constructor_that_asks_for_the_world_is_refused_on_several_ranks(how, parallel):
    what = "the environment variable WORLD_SIZE" if how == "environment" else "torch.distributed.is_initialized()"
    with pytest.raises(RequestError) as refused:
        plan_job(built(how, parallel))
    asks = TEXT.replace("middle asks for {} in its forward", f"the constructor asks for {what}")
    assert str(refused.value) == asks


def test_a_constructor_that_asks_for_the_world_is_planned_on_one_rank():
    plan_job(built("size", {}))


@pytest.mark.parametrize("parallel", [REPLICAS, STAGES], ids=["replicas", "stages"])
@pytest.mark.parametrize("how", ["random", "numpy"])
def test_draws_from_python_or_numpy_are_refused_on_several_ranks(how, parallel):
    with pytest.raises(RequestError) as refused:
        plan_job(net(how, parallel))
    assert str(refused.value) == DRAWS


@pytest.mark.parametrize("how", ["size", "rank", "reduce", "environment", "random", "numpy"])
def test_a_model_that_queries_the_world_is_planned_on_one_rank(how):
    plan_job(net(how, {}))


def test_a_query_whether_torch_supports_distributed_is_allowed():
    plan_job(net("available", REPLICAS))


def test_a_module_of_torch_that_is_imported_meanwhile_asks_nothing_for_the_model():
    asked: list[str] = []
    code = compile("from torch.distributed import distributed_c10d as c10d; c10d._world.default_pg", "made_up", "exec")
    with world_reads(asked.append):
        exec(code, {"__name__": "torch.distributed.made_up"})
    assert asked == []


@pytest.mark.parametrize(("folder", "reads"), [(INSTALLED[0], 0), ("/home/somebody", 1)], ids=["installed", "own"])
def test_an_installed_package_that_is_imported_meanwhile_asks_nothing_for_the_model(folder: str, reads: int) -> None:
    """networkx, which torch.compile imports, looks through all variables of the environment."""
    asked: list[str] = []
    code = compile("def look(): ask('RANK')\nlook()", f"{folder}/package/__init__.py", "exec")
    with world_reads(asked.append):
        exec(code, {"__name__": "package", "ask": ask})
    assert asked == ["RANK"] * reads
