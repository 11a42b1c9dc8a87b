"""Which tensors travel together, and how each requested size is applied."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.job.schema.parallel import CommFusion
from launcher.plan.communication.buckets_and_gathers import Limits
from launcher.plan.plan import ask
from launcher.plan.resolve.comm_fusion import limits, rows
from tests.plan.made import chain, job, planned, skeleton

F = "parallel.comm_fusion"
SHARDS = "launch.nproc=2 parallel.hsdp={}"
BOTH = "launch.nproc=4 parallel.hsdp={shard_size:2}"
TWO = "launch.nproc=2"
ALONE = "satisfied, one data-parallel rank, so nothing is summed or gathered"
LEVEL2 = "parallel.hsdp.optimizer_level=level2"
SCATTERED = "applied, gradients that are finished consecutively are scattered together up to this size"
TOGETHER = "applied, units that feed each other are sent together up to this size"
BECOMES = {
    "": [],
    f"{F}.openstate=false {TWO}":
        [f"{F}.openstate=false: applied, every module is gathered and every unsharded parameter reduced by itself"],
    f"{F}.openstate=false": [f"{F}.openstate=false: {ALONE}"],
    f"{F}.allreduce={{mode:size,config:32}} {TWO}":
        [f"{F}.allreduce=size 32.0 MB: applied, gradients of unsharded parameters are summed in buckets"],
    f"{F}.allreduce={{mode:size}}": [f"{F}.allreduce=size 64.0 MB: {ALONE}"],
    f"{F}.allreduce={{mode:index,config:[3,5]}} {TWO}":
        [f"{F}.allreduce=index [3, 5]: applied, gradients of unsharded parameters are summed in buckets"],
    f"{F}.allreduce={{mode:size,config:1}} {BOTH}":
        [f"{F}.allreduce=size 1.0 MB: degraded, only for unsharded parameters; gradients of sharded parameters are "
         "summed over replicas in the groups that scattered them"],
    f"{F}.allgather={{mode:size,config:1}} {TWO}":
        [f"{F}.allgather=size 1.0 MB: satisfied, nothing is sharded, so nothing is gathered or scattered"],
    f"{F}.allgather={{mode:size,config:1}} {SHARDS}": [f"{F}.allgather=size 1.0 MB: {TOGETHER}"],
    f"{F}.allgather={{mode:size,config:1}} {F}.reducescatter={{mode:size,config:8}} {SHARDS}":
        [f"{F}.allgather=size 1.0 MB: {TOGETHER}", f"{F}.reducescatter=size 8.0 MB: {SCATTERED}"],
    f"{F}.allgather={{mode:size,config:8}} {F}.reducescatter={{mode:size,config:1}} {SHARDS}":
        [f"{F}.allgather=size 8.0 MB: {TOGETHER}", f"{F}.reducescatter=size 1.0 MB: {SCATTERED}"],
    f"{F}.allgather={{mode:size,config:1}} {F}.reducescatter={{mode:size,config:8}} {SHARDS} {LEVEL2}":
        [f"{F}.allgather=size 1.0 MB: {TOGETHER}",
         f"{F}.reducescatter=size 8.0 MB: degraded, 1.0 MB, the smaller size: except at level1, FSDP2 "
         "scatters together what it gathered together"],
    f"{F}.network={{latency_us:50,gb_per_s:2}} {TWO}":
        [f"{F}.network=50 us + 2 GB/s: applied, auto is 1.9 MB: at this size the latency is 5 % of a collective's "
         "time"],
    f"{F}.network={{latency_us:50,gb_per_s:2}}": [f"{F}.network=50 us + 2 GB/s: {ALONE}"],
}  # fmt: skip


@pytest.mark.parametrize("overrides", BECOMES)
def test_every_switch_says_what_became_of_it(overrides: str) -> None:
    j = job(*overrides.split())
    found = rows(j, ask(j).sizes, None)
    assert [f"{s.key}={s.value}: {s.status}, {s.why}" for s in found] == BECOMES[overrides]


MB = 1 << 20
BOTH_SIZES = {"allgather": {"mode": "size", "config": 2}, "reducescatter": {"mode": "size", "config": 1}}
SIZES = {
    "default": ({}, Limits(False, None, 64 * MB)),
    "off": ({"openstate": False, "allreduce": {"mode": "size", "config": 1}}, Limits(True, None, 0)),
    "sizes": ({"allgather": {"mode": "size", "config": 2}, "allreduce": {"mode": "size", "config": 0.5}},
              Limits(False, 2 * MB, MB // 2)),
    "no size": ({"reducescatter": {"mode": "size"}, "allreduce": {"mode": "size"}},
                Limits(False, None, 64 * MB, scatter=64 * MB)),
    "each its own": (BOTH_SIZES, Limits(False, 2 * MB, 64 * MB, scatter=MB)),
    "fitted": ({"network": {"latency_us": 10, "gb_per_s": 1}}, Limits(False, 200_000, 200_000)),
    "index": ({"allreduce": {"mode": "index", "config": [2, 4]}}, Limits(False, None, 64 * MB, (2, 4))),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_are_megabytes_of_bytes(case: str) -> None:
    asked, want = SIZES[case]
    assert limits(with_fusion(asked)) == want


def with_fusion(asked: dict[str, Any], level: str = "level1") -> Job:
    j = job(f"parallel.hsdp.optimizer_level={level}")
    parallel = j.parallel.model_copy(update={"comm_fusion": CommFusion.model_validate(asked)})
    return j.model_copy(update={"parallel": parallel})


@pytest.mark.parametrize("level", ["level2", "level3"])
def test_the_smaller_size_is_for_both_where_torch_scatters(level: str) -> None:
    assert limits(with_fusion(BOTH_SIZES, level)) == Limits(False, MB, 64 * MB)


def test_a_parameter_number_that_there_is_not_is_refused() -> None:
    j = job(f"{F}.allreduce={{mode: index, config: [1, 2, 7]}}")
    with pytest.raises(RequestError) as refused:
        planned(j, skeleton({"a.weight": (2,), "b.weight": (2,)}), chain("a", "b"))
    assert str(refused.value) == (
        f"{F}.allreduce.config: 2: the model has 2 trainable parameters, numbered 0 to 1 "
        f"(try: {F}.allreduce.config=[1])"
    )


@pytest.mark.parametrize("name", ["allreduce", "allgather"])
def test_auto_takes_no_size(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        CommFusion.model_validate({name: {"mode": "auto", "config": 32}})
    text = f"{name}: {{'mode': 'auto', 'config': 32}}: mode auto takes no config; for 32 MB: mode=size"
    assert str(caught.value) == text
