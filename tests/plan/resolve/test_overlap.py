"""What a plan says about communication beside computation, also for matmuls over ``tp``."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.plan.resolve.overlap import AT_THE_END, AT_USE
from launcher.plan.show.text import text
from launcher.planner.plan_job import plan_job
from tests.parity import job
from tests.test_parity_tp import COLUMN, MEGATRON, SEQUENCE
from tests.tiers import ALL

MATMUL = "grad_matmul_communication_overlap"
ZERO = {"stages": 2, "micro_batch_num": 4, "scheduler": "zero_bubble_h1"}
AOT: dict[str, Any] = {"backend": "aot_eager"}
BESIDE = "are sent while weight gradients are computed"
GATHERED = "weights are gathered once a step, ahead of use, and waited for where a group is used first"
REDUCED = "each bucket of a stage is sent while its last backward runs"


def tp(operators: dict[str, Any], on: bool | str | None = True, **changes: Any) -> Job:
    switches = {} if on is None else {MATMUL: on}
    pipeline = changes.pop("pipeline", {})
    parallel = {"operators": operators, "grid": {"tp": 2}, "transformer_opt": switches, "pipeline": pipeline}
    return job(parallel=parallel, **changes)


BECOMES: dict[str, tuple[Job, str]] = {
    "all": (tp(MEGATRON), f"applied, input gradients of 9 matmuls {BESIDE}"),
    "by name": (tp(SEQUENCE, "AllReduce, ReduceScatter"), f"applied, input gradients of 9 matmuls {BESIDE}"),
    "by another name": (
        tp(SEQUENCE, "AllReduce"), "satisfied, no trained matmul sends the gradient of its input by all-reduce"),
    "a table alone": (
        tp({"embed": COLUMN}, model__tied=False), "satisfied, no operator that is cut sends anything in backward"),
    "norms": (
        tp({"norm": {"input": ["dp", "tp", None]}, "head": {"output": ["dp", None, None]}}, model__tied=False),
        "satisfied, no trained matmul sends the gradient of its input"),
    "split backwards": (
        tp(MEGATRON, pipeline=ZERO, launch={"nproc": 4}),
        "degraded, input gradients of 9 matmuls are waited for: weight gradients are computed in the second half of "
        "a backward"),
    "compiled blocks": (
        tp(MEGATRON, train__compile=AOT),
        f"degraded, input gradients of 1 matmul {BESIDE}; those of 8 matmuls that torch compiles are waited for"),
    "compiled stages": (
        tp(MEGATRON, train__compile=AOT | {"modules": "stages"}),
        "degraded, input gradients of 9 matmuls that torch compiles are waited for"),
}  # fmt: skip


@pytest.mark.parametrize("case", [c for c in BECOMES if ALL or "compiled" not in c])
def test_a_plan_says_of_how_many_matmuls(case):
    j, becomes = BECOMES[case]
    assert [f"{s.status}, {s.why}" for s in plan_job(j).settings if MATMUL in s.key] == [becomes]


def test_other_names_are_refused():
    key = f"parallel.transformer_opt.{MATMUL}"
    with pytest.raises(RequestError) as caught:
        plan_job(tp(MEGATRON, "MatMul"))
    should = "should be true, false or some of AllReduce,ReduceScatter,AllGather,AlltoAll"
    assert str(caught.value) == f"{key}: MatMul: {should} (try: {key}=false)"


def sharded(level: str, on: bool) -> Job:
    switches = {"grad_computation_allreduce_overlap": on, "computation_allgather_overlap": on, MATMUL: on}
    hsdp = {"threshold": 0, "optimizer_level": level}
    parallel = {"operators": MEGATRON, "grid": {"tp": 2}, "hsdp": hsdp, "transformer_opt": switches}
    return job(parallel=parallel, launch={"nproc": 4, "device": "npu"})


WAITS = "input gradients of 9 matmuls over tp are waited for"
FSDP2 = ("FSDP2 gathers the next group while this one computes", "FSDP2 reduces each group while backward runs the "
         "next")  # fmt: skip
LINES: dict[str, tuple[Job, tuple[str, ...]]] = {
    "nothing is sent": (job(), ()),
    "replicas": (job(launch={"nproc": 2}), (AT_THE_END,)),
    "tp": (tp(MEGATRON, None), (WAITS,)),
    "some of it": (tp(SEQUENCE, "AllReduce"), (WAITS,)),
    "level1": (sharded("level1", True), (GATHERED, REDUCED, f"input gradients of 9 matmuls {BESIDE}")),
    "level1, nothing wanted": (sharded("level1", False), (AT_USE, AT_THE_END, WAITS)),
    "level3, nothing wanted": (sharded("level3", False), (*FSDP2, WAITS)),
}


@pytest.mark.parametrize("case", LINES)
def test_the_plan_has_a_line_of_what_it_sends(case):
    j, lines = LINES[case]
    plan = plan_job(j)
    assert plan.overlaps == lines
    assert ("  overlap   " in text(plan)) == bool(lines)
