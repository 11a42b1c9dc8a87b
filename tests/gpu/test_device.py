"""Training on a device equals a hand-written loop there; each test also runs on the CPU.

``make test-gpu`` runs the tests that need a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from launcher.job.schema.job import Job
from launcher.job.schema.train import Train
from launcher.planner.plan_job import plan_job
from launcher.runtime.training.throughput import peak_flops
from tests.gpu import rank_work
from tests.gpu.on_device import DEVICES, ONLY_GPU, ranks
from tests.parity import Outcome, Step, assert_same, job, outcome

# the same kernels on the same numbers; only the order in which micro batches are added differs
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-6, "fp16": 1e-6}
RECOMPUTE = {
    "full": {"modules": "layers.*"},
    "selective": {"modules": "layers.*", "policy": "selective"},
    "every other": {"modules": "layers.*", "every": 2},
}
SHARED = {
    "2 stages": {"pipeline": {"stages": 2, "micro_batch_num": 4}},
    "interleaved": {"pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 4}},
    "2 replicas": {"grid": {"dp_replicate": 2}},
    **{
        level: {"hsdp": {"shard_size": 2, "threshold": 0, "optimizer_level": level}}
        for level in ("level1", "level2", "level3")
    },
}
COMPILES = "compile" in Train.model_fields


def lm(**changes: Any) -> Job:
    """An untied model: two uses of one table are added in another order than in a plain model."""
    return job(model__tied=False, **changes)


def assert_parity(j: Job, device: str, size: int = 1) -> None:
    plan = plan_job(j)
    found = ranks(device, size, rank_work.one_step, j, plan)
    [want] = ranks(device, 1, rank_work.by_hand, j, plan, plan.sizes.micros * plan.sizes.replicas)
    assert_same(outcome(plan, found), want, TOLERANCE[plan.precision])


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("device", DEVICES)
def test_one_rank_has_the_gradients_of_a_hand_written_loop(device: str, precision: str) -> None:
    changes: dict[str, Any] = {"train__loss_scale": 1.0} if precision == "fp16" else {}
    assert_parity(lm(train__precision=precision, parallel__pipeline__micro_batch_num=2, **changes), device)


@pytest.mark.parametrize("policy", RECOMPUTE)
@pytest.mark.parametrize("device", DEVICES)
def test_what_runs_again_gives_the_same_bits(device: str, policy: str) -> None:
    def step(**changes: Any) -> tuple[float, Outcome]:
        j = lm(train__precision="fp32", **changes)
        plan = plan_job(j)
        found: list[Step] = ranks(device, 1, rank_work.one_step, j, plan, True)
        return found[0][0], outcome(plan, found)

    plain, again = step(), step(parallel__recompute=RECOMPUTE[policy])
    assert again[0] == plain[0]
    assert again[1].grads.keys() == plain[1].grads.keys()
    assert [n for n, g in plain[1].grads.items() if not torch.equal(g, again[1].grads[n])] == []


@pytest.mark.skipif(not COMPILES, reason="train.compile is not a setting of this version")
@pytest.mark.parametrize("device", [ONLY_GPU])
def test_a_compiled_model_has_the_gradients_of_a_hand_written_loop(device: str) -> None:
    """On the CPU, other tests cover what is compiled."""
    compiled = {"modules": "layers.*", "backend": "inductor"}
    assert_parity(lm(train__precision="fp32", train__compile=compiled), device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_overflows_is_skipped_until_the_scale_fits(device: str, tmp_path: Any) -> None:
    j = lm(train__precision="fp16")
    [seen] = ranks(device, 1, rank_work.overflowing, j, plan_job(j), tmp_path)
    assert seen.scales == [2.0 ** (40 - n) for n in range(len(seen.scales))]
    assert seen.moved == [False] * (len(seen.moved) - 1) + [True]
    assert len(seen.moved) > 1
    assert math.isfinite(seen.losses[-1])


@pytest.mark.parametrize("beside", [False, True], ids=["waited for", "by a thread"])
@pytest.mark.parametrize("device", DEVICES)
def test_training_goes_on_from_a_checkpoint_with_the_same_losses(device: str, beside: bool, tmp_path: Any) -> None:
    j = lm(checkpoint={"every": 1, "async": beside})
    [found] = ranks(device, 1, rank_work.saved_and_loaded, j, plan_job(j), tmp_path, beside)
    assert found.again == pytest.approx(found.after, rel=1e-12)
    assert found.pinned == ({device == "cuda"} if beside else set())


@pytest.mark.parametrize("device", DEVICES)
def test_later_steps_do_not_change_what_the_saving_thread_writes(device: str, tmp_path: Any) -> None:
    j = lm(checkpoint={"every": 1, "async": True})
    assert ranks(device, 1, rank_work.two_saves_of_one_moment, j, plan_job(j), tmp_path) == [[]]


@pytest.mark.parametrize("layout", SHARED)
@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_on_one_device_have_the_gradients_of_one(device: str, layout: str) -> None:
    assert_parity(lm(train__precision="fp32", parallel=SHARED[layout]), device, size=2)


@pytest.mark.parametrize("device", [ONLY_GPU])
def test_a_step_waits_for_its_device_once(device: str, tmp_path: Any) -> None:
    j = lm(train__precision="bf16")
    [where] = ranks(device, 1, rank_work.waits_for_the_device, j, plan_job(j), tmp_path)
    assert [at.rpartition("/")[2].partition(":")[0] for at in where] == ["local.py"], where


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_says_what_is_known_of_its_device(device: str, tmp_path: Any) -> None:
    j = lm(train__precision="bf16")
    [(name, row)] = ranks(device, 1, rank_work.row_of_a_step, j, plan_job(j), tmp_path)
    known = ["memory_mb", "memory_reserved_mb"] if device == "cuda" else ["memory_mb"]
    if peak_flops(name, "bfloat16"):
        known += ["tflops", "mfu"]
    assert list(row) == known
    assert all(value > 0 for value in row.values())
