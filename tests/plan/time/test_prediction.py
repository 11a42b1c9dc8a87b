"""Steps of synthetic work whose seconds are known, and laws that hold for all plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.job.compose import compose
from launcher.job.schema.cluster import Cluster
from launcher.plan.plan import Plan
from launcher.plan.schedule.schedules import interleaved_less_memory
from launcher.plan.show.prediction import prediction_rows
from launcher.plan.time.prediction import Prediction, predict
from launcher.plan.time.speeds import speeds_of
from launcher.plan.time.step_work import ActionWork, RankWork, StageWork, StepWork
from launcher.plan.values.grid import Grid
from launcher.plan.values.operations import NOTHING, Operations, Product
from launcher.planner.plan_job import plan_job
from tests.parity import job

FAST: dict[str, Any] = {
    "name": "fast", "devices_per_node": 4, "tflops": {"fp32": 1, "fp64": 1}, "efficiency": 1, "memory_gb_per_s": 1e6,
    "links": {"inside": {"latency_us": 0, "gb_per_s": 100}, "between": {"latency_us": 0, "gb_per_s": 10}},
    "kernels": {"small": 0, "launch_us": 0, "memory": 1}, "overheads": {"exposed": 1, "exposed_sums": 1},
}  # fmt: skip
SECOND = Operations(((Product(1000, 1000, 500_000, 1, 0), 1),))
"""One second of work on the device above: 1e12 flops, and no bytes."""
TWO = Operations(((Product(1000, 1000, 500_000, 1, 0), 2),))
STAGE = StageWork(ActionWork(SECOND), ActionWork(TWO), late=NOTHING, saved=0, waits=0)
RANK = RankWork(share=(), same=(), tied=(), state=0, memory=0)


def work(pp: int, micros: int, **changes: Any) -> StepWork:
    made = StepWork(
        grid=Grid.of(pp=pp, dp_replicate=1, dp_shard=1, tp=1),
        places=tuple(range(pp)),
        schedule=interleaved_less_memory(pp, 1, micros),
        micros=micros,
        pieces=1,
        stages=(STAGE,) * pp,
        crossings=(0,) * (pp - 1),
        ranks=(RANK,) * pp,
        replicated=False,
        flops=3 * 10**12 * pp * micros,
        samples=8,
        tokens=None,
    )
    return replace(made, **changes)


MEGATRON = compose(["operators=megatron"]).job.parallel.operators


def step(made: StepWork, **overheads: float) -> Prediction:
    cluster = Cluster.model_validate(FAST | {"overheads": FAST["overheads"] | overheads})
    speeds = speeds_of(cluster, "fp32")
    assert speeds is not None
    return predict(made, speeds)


def terms(found: Prediction) -> dict[str, float]:
    return {t.name: round(t.seconds, 6) for t in found.terms if round(t.seconds, 6)}


def test_one_stage_takes_the_sum_of_its_micro_batches() -> None:
    found = step(work(1, 4))
    assert found.seconds == pytest.approx(12)
    assert found.mfu == pytest.approx(1)
    assert terms(found) == {"kernels": 12.0}


def test_a_pipeline_has_the_bubble_of_1f1b() -> None:
    """With p equal stages and m micro batches, a step takes (m + p - 1) passes."""
    found = step(work(4, 8))
    assert found.seconds == pytest.approx((8 + 3) * 3)
    assert terms(found) == {"kernels": 24.0, "pipeline bubble": 9.0}


def test_messages_between_stages_make_the_bubble_longer() -> None:
    """Each message takes 0.1 s; the first micro batch sends one to every next stage, and one back."""
    found = step(work(2, 2, crossings=(10**10,)))
    assert found.seconds > 9
    assert terms(found)["kernels"] == 6.0


def test_gradients_are_waited_for_as_far_as_nothing_hides_them() -> None:
    grid = Grid.of(pp=1, dp_replicate=2, dp_shard=1, tp=1)
    sent = replace(RANK, same=(("all_reduce", 10**11, 1),))
    made = work(1, 1, grid=grid, ranks=(sent,))
    assert terms(step(made, exposed_sums=0.25)) == {"kernels": 3.0, "gradients and weights on the network": 0.25}
    long = work(1, 1, grid=grid, ranks=(replace(RANK, same=(("all_reduce", 10**12, 1),)),))
    assert terms(step(long, exposed_sums=0.25))["gradients and weights on the network"] == 10 - 3


def test_collectives_over_tp_lie_between_kernels() -> None:
    sent = (("all_gather", 2 * 10**10, 1),)
    stage = replace(STAGE, forward=ActionWork(SECOND, sent))
    made = work(1, 2, grid=Grid.of(pp=1, dp_replicate=1, dp_shard=1, tp=2), stages=(stage,))
    assert terms(step(made)) == {"kernels": 6.0, "collectives over tp": 0.2}


def test_the_host_is_waited_for_where_it_is_slower() -> None:
    cluster = Cluster.model_validate(FAST | {"kernels": FAST["kernels"] | {"launch_us": 1e6}})
    speeds = speeds_of(cluster, "fp32")
    assert speeds is not None
    stage = replace(STAGE, forward=ActionWork(Operations(kernels=10)), backward=ActionWork(Operations(kernels=30)))
    assert predict(work(1, 1, stages=(stage,)), speeds).seconds == pytest.approx(40)


def test_optimizer_overheads_and_a_full_device() -> None:
    made = work(1, 1, ranks=(replace(RANK, state=10**15, memory=100 << 30),))
    assert terms(step(made, step_ms=500)) == {"kernels": 3.0, "optimizer": 1.0, "overheads": 0.5}
    full = Cluster.model_validate(FAST | {"memory_gb": 80, "overheads": FAST["overheads"] | {"near_limit": 2.0}})
    speeds = speeds_of(full, "fp32")
    assert speeds is not None
    found = predict(made, speeds)
    assert terms(found)["allocator near its limit"] == pytest.approx(2 * 4.0, rel=1e-3)


def test_a_plan_says_what_a_step_waits_for() -> None:
    told = dict(prediction_rows(replace(step(work(4, 8)), tokens=1000)))
    assert list(prediction_rows(None)) == []
    assert told == {"time": "waits: kernels 73% (for the devices), pipeline bubble 27% (for other stages)"}
    first, _ = (text for _, text in prediction_rows(replace(step(work(4, 8)), tokens=1000)))
    assert first == "33.0 s a step on fast: 30 tokens/s, 8 a device, MFU 72.7% (predicted)"


def planned(**changes: Any) -> Plan:
    return plan_job(job(cluster=FAST, **changes))


def test_without_speeds_nothing_is_predicted() -> None:
    assert plan_job(job()).estimate.step is None


def test_a_prediction_changes_nothing_else_in_a_plan() -> None:
    cpu = {"launch": {"nproc": 1, "device": "cpu"}}  # a cluster's devices have kernels that a CPU lacks
    with_speeds, without = planned(**cpu), plan_job(job(**cpu))
    assert with_speeds.estimate.step is not None
    assert replace(with_speeds, estimate=replace(with_speeds.estimate, step=None)) == without


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel": {"grid": {"tp": 2}, "operators": MEGATRON}, "launch__nproc": 2},
        {"parallel__hsdp": {"shard_size": 2, "optimizer_level": "level3"}, "launch__nproc": 2},
    ],
)
def test_devices_twice_as_fast_are_never_slower(changes: dict[str, Any]) -> None:
    slow = planned(**changes).estimate.step
    twice = FAST | {"tflops": {"fp32": 2, "fp64": 2}}
    fast = plan_job(job(cluster=twice, **changes)).estimate.step
    assert slow is not None
    assert fast is not None
    assert fast.seconds < slow.seconds


def test_terms_add_up_to_the_step() -> None:
    found = compose(["recipe=lm_8b_h100x64", "model.layers=4", "parallel.recompute=null"]).job
    predicted = plan_job(found).estimate.step
    assert predicted is not None
    assert sum(t.seconds for t in predicted.terms) == pytest.approx(predicted.seconds)
    assert all(t.seconds >= 0 for t in predicted.terms)
    assert predicted.tokens == 128 * 8192


def test_cores_that_rest_make_kernels_faster_and_no_network() -> None:
    """Two nodes with two cores run one rank each: 3 s of kernels, and 10 GB over a ring with 10 GB per second."""
    sends = RankWork(share=(), same=(("all_reduce", 10**10, 1),), tied=(), state=0, memory=0)
    grid = Grid.of(pp=1, dp_replicate=2, dp_shard=1, tp=1)
    made = work(1, 1, grid=grid, ranks=(sends,))

    def seconds(alone: float) -> dict[str, float]:
        kernels = FAST["kernels"] | {"alone": alone}
        speeds = speeds_of(Cluster.model_validate(FAST | {"kernels": kernels, "cores_per_node": 2}), "fp32", 1)
        assert speeds is not None
        return {t.name: t.seconds for t in predict(made, speeds).terms}

    usual, faster = seconds(1.0), seconds(1.5)
    assert (usual["kernels"], faster["kernels"]) == (pytest.approx(3), pytest.approx(2))
    sent = "gradients and weights on the network"
    assert usual[sent] == faster[sent] == pytest.approx(1)


def test_a_second_half_takes_its_products_and_nothing_else_of_a_backward() -> None:
    """Norms, attention, the loss and the gradients of inputs are in the first half."""
    split = {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4}
    made = planned(parallel__pipeline=split, launch__nproc=2)
    found = made.estimate.step
    assert found is not None
    speeds = speeds_of(Cluster.model_validate(FAST), "fp32")
    assert speeds is not None
    took = {str(e.action): e.end - e.start for e in found.timeline.events}
    for stage, one in zip(made.stages, made.estimate.work.stages, strict=True):
        assert one.late.flops == stage.deferred > 0
        whole = dict(one.backward.kernels.products)
        assert all(whole[product] >= times for product, times in one.late.products)
        later = speeds.device_seconds(one.late, backward=True)
        assert took[f"{stage.index}W0"] == pytest.approx(later)
        both = took[f"{stage.index}I0"] + took[f"{stage.index}W0"]
        assert both == pytest.approx(speeds.device_seconds(one.backward.kernels, backward=True))


@pytest.mark.parametrize(("grid", "seconds"), [({"dp_shard": 4}, 1.5), ({"pp": 2, "dp_shard": 2}, 2.0)])
def test_groups_that_are_at_it_at_once_share_the_cores(grid: dict[str, int], seconds: float) -> None:
    """On two cores, a ring of all four ranks takes the measured time of one ring; two rings of two take twice that."""
    sizes = Grid.of(**{"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1} | grid)
    sends = replace(RANK, share=(("all_gather", 2 * 10**11, 1),))
    made = work(sizes["pp"], 1, grid=sizes, ranks=(sends,) * sizes["pp"])
    shared = FAST | {"cores_per_node": 2, "overheads": {"exposed": 1.0}}
    speeds = speeds_of(Cluster.model_validate(shared), "fp32", 4)
    assert speeds is not None
    assert terms(predict(made, speeds))["gradients and weights on the network"] == pytest.approx(seconds)
