"""Which dtypes a precision stands for, and in which dtype gradients travel."""

from __future__ import annotations

import pytest

from launcher.plan.plan import ask
from launcher.plan.resolve.precision import rows
from launcher.plan.values.precision import precision
from tests.plan.made import job

TWO = "launch.nproc=2"
BECOMES = {
    "": [],
    "train.precision=bf16":
        ["train.precision=bf16: applied, the model runs in bfloat16; weights, gradients, optimizer state and loss "
         "stay float32"],
    "train.precision=fp16":
        ["train.precision=fp16: applied, the model runs in float16; weights, gradients, optimizer state and loss "
         "stay float32",
         "train.loss_scale=null: applied, 65536, halved at an overflow, doubled after 2000 steps without one; an "
         "overflow "
         "skips the step"],
    "train.precision=fp16 train.loss_scale=8":
        ["train.precision=fp16: applied, the model runs in float16; weights, gradients, optimizer state and loss "
         "stay float32",
         "train.loss_scale=8: applied, 8, fixed; an overflow ends the run"],
    "train.loss_scale=8": ["train.loss_scale=8: satisfied, fp32 gradients need no scaling"],
    "parallel.fp32_communication=true":
        ["parallel.fp32_communication=true: satisfied, gradients are fp32 already; they are sent unchanged"],
    "parallel.gradient_fp32_sync=false train.precision=fp64":
        ["parallel.gradient_fp32_sync=false: satisfied, gradients are fp64 already; nothing to lower"],
}  # fmt: skip


@pytest.mark.parametrize("overrides", BECOMES)
def test_every_setting_says_what_became_of_it(overrides: str) -> None:
    j = job(*overrides.split())
    found = rows(j, ask(j).sizes, None)
    assert [f"{s.key}={s.value}: {s.status}, {s.why}" for s in found] == BECOMES[overrides]


BF16 = "train.precision=bf16"
TRAVELS = {
    "": ("float32", []),
    "parallel.gradient_fp32_sync=false": ("bfloat16", [
        "parallel.gradient_fp32_sync=false: applied, gradients are sent in bfloat16"]),
    "parallel.gradient_fp32_sync=false parallel.fp32_communication=true": ("float32", [
        "parallel.fp32_communication=true: applied, gradients are sent in float32",
        "parallel.gradient_fp32_sync=false: satisfied, gradients are sent in float32, as "
        "parallel.fp32_communication=true requests"]),
}  # fmt: skip


@pytest.mark.parametrize("overrides", TRAVELS)
def test_gradients_of_bf16_travel_in_fp32_unless_nothing_asks_for_it(overrides: str) -> None:
    j = job(BF16, TWO, *overrides.split())
    _, *rest = rows(j, ask(j).sizes, None)
    said = [f"{s.key}={s.value}: {s.status}, {s.why}" for s in rest]
    assert (precision(j).reduce, said) == TRAVELS[overrides]
