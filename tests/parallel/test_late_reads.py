"""A backward may read what was not saved for it only where its rank has it."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, own

PIPE = {"stages": 2, "micro_batch_num": 2}


def sharded(level: str) -> dict[str, Any]:
    return {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": level}}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "level1": sharded("level1"),
    "level2": sharded("level2"),
    "level3": sharded("level3"),
    "apart": {"pipeline": {**PIPE, "stage_config": {"a": 0, "b": 0, "c": 1, "head": 1}}},
    "together": {"pipeline": {**PIPE, "stage_config": {"a": 0, "b": 1, "c": 1, "head": 1}}},
    "recompute": {"recompute": {"modules": ["b", "c"]}},
}
READS = "model: the backward of b reads c.weight of another module by a reference in Python"
PASS = "pass it to its forward, and save it for the backward"
FREED = f"{READS}, but {{0}} may have freed it by then; {PASS} (try: parallel.hsdp.optimizer_level=level2)"
REFUSED = {
    "level1": FREED.format("level1"),
    "level3": FREED.format("level3"),
    "apart": f"{READS}, but runs on stage 0, which does not have it; {PASS}, or put both modules on one stage",
}


def late_reads(kind: str, layout: str, *, far: bool) -> Job:
    model = {"_target_": "tests.parallel.late_read_nets.LateReads", "kind": kind, "far": far}
    parallel = LAYOUTS[layout]
    return own("late_read_nets.LateReads", [6], stages=1, model=model, parallel=parallel, train__batch_size=8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["function", "tensor hook", "value", "module hook"])
def test_a_weight_of_another_module(kind: str, layout: str) -> None:
    j = late_reads(kind, layout, far=True)
    if layout not in REFUSED:
        assert_parity(j)
        return
    with pytest.raises(RequestError) as refused:
        plan_job(j)
    assert str(refused.value) == REFUSED[layout]


@pytest.mark.parametrize("layout", ["level1", "level3", "apart"])
@pytest.mark.parametrize("kind", ["function", "module hook", "saved"])
def test_the_modules_own_weight(kind: str, layout: str) -> None:
    assert_parity(late_reads(kind, layout, far=False))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_of_another_module_that_changes_with_its_calls(layout: str) -> None:
    parallel = LAYOUTS[layout] if layout != "recompute" else {"recompute": {"modules": ["b"]}}
    j = own("late_read_nets.Numbers", [6], stages=1, parallel=parallel, train__batch_size=8)
    if layout != "apart":
        assert_parity(j, parts=2 if layout == "together" else 1)  # each micro batch is a call
        return
    with pytest.raises(RequestError) as refused:
        plan_job(j)
    assert str(refused.value) == REFUSED["apart"].replace("c.weight", "c.rate")
