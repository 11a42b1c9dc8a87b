"""The cluster that a plan is made for: devices per node, their speeds and their links."""

from __future__ import annotations

import shlex

import pytest

from launcher.extras.device_matrix.search.cost import CostModel, on_cluster
from launcher.job.compose import BadRequest
from launcher.planner.plan_job import plan_job
from tests.plan.made import job, refusal

NPROC = "launch.nproc: 16: a node of h100_sxm has 8 devices"
REFUSED = {
    "launch.nproc=16": f"{NPROC} (try: launch.nproc=8 launch.nnodes=2)",
    "launch.nproc=12": NPROC.replace("16", "12"),
}


@pytest.mark.parametrize("typed", REFUSED)
def test_more_ranks_than_a_node_has_devices_are_refused(typed: str) -> None:
    error = refusal("cluster=h100_sxm", typed, "train.batch_size=48")
    assert str(error) == REFUSED[typed]
    (problem,) = error.problems
    if problem.cure:
        plan_job(job("cluster=h100_sxm", "train.batch_size=48", *shlex.split(problem.cure)))


def test_ranks_that_share_cores_may_be_more_than_those_that_were_measured() -> None:
    assert plan_job(job("cluster=here", "launch.nproc=8", "train.batch_size=48")).sizes.grid.size == 8


BAD = {
    "cluster=h100": "cluster: unknown option 'h100', did you mean 'h100_sxm'? "
    "(options: a100_80g, ascend_910b, b200, h100_sxm, here, unknown) (try: cluster=h100_sxm)",
    "cluster.tflops={bf16: 100}": "cluster: {name:null,memory_gb:null,devices_per_node:null,cores_per...: "
    "give devices_per_node, efficiency, memory_gb_per_s, links with the other speeds, or give none",
}


@pytest.mark.parametrize("typed", BAD)
def test_invalid_cluster_settings_are_refused(typed: str) -> None:
    with pytest.raises(BadRequest) as caught:
        job(typed)
    assert str(caught.value) == BAD[typed]


def test_costs_are_those_of_the_cluster_over_the_nodes_of_a_stage() -> None:
    here = job("cluster=h100_sxm", "train.precision=bf16", "launch.nproc=8", "launch.nnodes=2")
    costs = on_cluster(CostModel(), here, 8)
    assert (costs.flops_per_second, costs.memory_bytes_per_second) == (989e12 * 0.72, 3350e9 * 0.75)
    assert (costs.latency, costs.bytes_per_second) == (pytest.approx(7 * 3e-6), 370e9)
    across = on_cluster(CostModel(), here, 16)
    assert (across.latency, across.bytes_per_second) == (pytest.approx(15 * 30e-6), 8 * 45e9)
    assert on_cluster(CostModel(), job(), 8) == CostModel()


def test_a_precision_that_is_not_listed_is_as_slow_as_the_slowest() -> None:
    here = job("cluster=h100_sxm", "cluster.tflops={bf16: 989, fp32: 67}", "train.precision=fp64")
    assert on_cluster(CostModel(), here, 1).flops_per_second == 67e12 * 0.72


def test_strategies_are_searched_for_on_the_cluster_and_its_network_is_in_the_plan() -> None:
    operators = "+parallel.operators={layers.0.attn.q: {in: [[1,1,1],[4,1]]}}"
    made = plan_job(job("cluster=a100_80g", "launch.nproc=4", operators))
    assert made.sharding is not None
    assert (made.sharding.latency, made.sharding.bytes_per_second) == (pytest.approx(3 * 4e-6), 215e9)
    told = plan_job(
        job(
            "cluster=a100_80g", "launch.nproc=4", operators, "parallel.comm_fusion.network={latency_us: 9, gb_per_s: 3}"
        )
    )
    assert told.sharding is not None
    assert (told.sharding.latency, told.sharding.bytes_per_second) == (9e-6, 3e9)
