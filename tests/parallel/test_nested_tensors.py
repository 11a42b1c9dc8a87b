"""Nested tensors train inside a stage; they cannot cross stages, and a module that makes one cannot be recomputed."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, own

REPLICAS: dict[str, Any] = {"grid": {"dp_replicate": 2}}


def net(name: str, parallel: dict[str, Any], **options: Any) -> Job:
    model = {"_target_": f"tests.parallel.nested_nets.{name}", **options}
    data = {"_target_": "tests.parallel.sources.Shapes", "shapes": [[3, 6]], "target": []}
    return own(f"nested_nets.{name}", [3, 6], stages=1, model=model, data=data, parallel=parallel)


def refusal(job: Job) -> str:
    with pytest.raises(RequestError) as refused:
        plan_job(job)
    return str(refused.value)


def test_nested_tensors_pass_between_modules_of_one_stage() -> None:
    assert_parity(net("Between", REPLICAS))


@pytest.mark.parametrize("reads", [False, True], ids=["fixed", "read"])
def test_a_module_that_makes_a_nested_tensor_is_not_recomputed(reads: bool) -> None:
    text = "b cannot be recomputed in the backward: its second forward saved other tensors than the first"
    assert text in refusal(net("Inside", {"recompute": {"modules": "b"}}, reads=reads))
    assert plan_job(net("Inside", {"recompute": {"modules": "a"}}, reads=reads)).recomputed


def test_a_model_that_returns_a_nested_tensor_is_refused() -> None:
    text = refusal(net("Between", {}, returned=True))
    assert text.startswith(
        "model: its forward returns a nested tensor, neither a tensor nor a plain tuple, list or dict"
    )
    assert "return super().forward(*inputs).values()" in text
