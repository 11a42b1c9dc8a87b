"""Seconds made from known constants give these constants back; measurements that differ too much are refused."""

from __future__ import annotations

from typing import Literal

import pytest
import yaml

from launcher.extras.calibration.constants import (
    FittedConstant,
    MeasuredMachine,
    Moved,
    Overlap,
    Round,
    Taken,
    Timed,
    TimedAttention,
    TimedBlock,
    TimedCollective,
    TimedMessage,
    TimedProduct,
    Trained,
    cluster,
    constants,
    fitted,
    refusal,
    taken,
)
from launcher.extras.calibration.refit import cluster_file, number
from launcher.job.compose import compose
from launcher.job.schema.cluster import Cluster
from launcher.plan.schedule.schedules import depth_first
from launcher.plan.time.prediction import predict
from launcher.plan.time.speeds import Speeds, speeds_of
from launcher.plan.time.step_work import ActionWork, RankWork, StageWork, StepWork
from launcher.plan.values.grid import Grid
from launcher.plan.values.operations import NOTHING, Operations, Product

TRUE = {
    "tflops.fp32": 0.1, "tflops.bf16": 0.2, "efficiency": 0.8, "kernels.small": 30.0,
    "memory_gb_per_s": 20.0, "kernels.attention": 0.25, "kernels.memory": 0.5, "kernels.launch_us": 4.0,
    "links.inside.latency_us": 200.0, "links.inside.gb_per_s": 1.5,
    "links.between.latency_us": 900.0, "links.between.gb_per_s": 0.5, "overheads.scatter": 2.5,
    "links.inside.message_gb_per_s": 3.0, "links.between.message_gb_per_s": 1.0,
    "overheads.exposed": 0.25, "overheads.exposed_sums": 0.25, "overheads.exposed_tp": 1.5,
    "overheads.slot_ms": 0.4, "overheads.step_ms": 5.0,
}  # fmt: skip
OTHERS, TINY, COPY = Operations(moved=10**8, kernels=100), Operations(kernels=60), Operations(moved=10**8, kernels=1)


def step_work(pp: int, replicas: int) -> StepWork:
    one = StageWork(
        ActionWork(Operations(kernels=50)), ActionWork(Operations(kernels=90)), late=NOTHING, saved=0, waits=0
    )
    sent = RankWork(share=(), same=(("all_reduce", 10**5, 1),) if replicas > 1 else (), tied=(), state=10**5, memory=0)
    return StepWork(
        grid=Grid.of(pp=pp, dp_replicate=replicas, dp_shard=1, tp=1),
        places=tuple(range(pp)),
        schedule=depth_first(pp, 1, 2 * pp),
        micros=2 * pp,
        pieces=1,
        stages=(one,) * pp,
        crossings=(1000,) * (pp - 1),
        ranks=(sent,) * pp,
        replicated=False,
        flops=10**6,
        samples=8,
        tokens=None,
    )


def machine(cores: int | None) -> MeasuredMachine:
    return MeasuredMachine(
        "fp32", step_work(1, 4), step_work(4, 1), name="mine", memory_gb=8.0, per_node=4, cores=cores
    )


def one_round(at: MeasuredMachine, slow: float = 1.0) -> Round:
    """Return the times of one round on a cluster with the numbers above; the machine is ``slow`` times slower."""
    told = cluster(TRUE, at)
    fast = speeds_of(told, "fp32", 4)
    assert fast is not None
    out: dict[Timed, float] = {}

    # kernels; the fastest product of all is at the peak
    for sides in ((1000, 200, 300), (400, 400, 400), (100, 300, 900)):
        product = Product(*sides)
        short = 1 + 30 * sum(1 / n for n in sides)
        out[TimedProduct("fp32", product)] = product.flops / 0.08e12 * short
    peak = Product(10**9, 10**9, 10**9)
    out[TimedProduct("fp32", peak)] = peak.flops / 0.08e12
    out[TimedProduct("bf16", Product(10, 10, 10))] = 2000 / 0.2e12
    out[TimedAttention("fp32", 10**9)] = 10**9 * (1 + 2.5 / 0.8) / 0.02e12
    out[Moved("copy", COPY)] = 10**8 / 16e9
    out[Moved("others", OTHERS)] = 10**8 / 8e9 + (100 * 4e-6 if at.cores else 0.0)
    out[Moved("tiny", TINY)] = 60 * 4e-6
    if at.cores:
        out |= {TimedBlock(alone=False): 0.3, TimedBlock(alone=True): 0.2}
    return {what: s * slow for what, s in (out | sent(fast, at) | trained(at)).items()}


def sent(fast: Speeds, at: MeasuredMachine) -> dict[Timed, float]:
    out: dict[Timed, float] = {
        Overlap("product"): 2.0,
        Overlap("network"): 4.0,
        Overlap("both"): 3.0,
        Overlap("turns"): 8.0,
    }
    for n in (2, 3, 4):
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            for nbytes in (10**4, 10**6, 10**7):
                inside = fast.collective_seconds(kind, nbytes, tuple(range(n)))
                between = fast.collective_seconds(kind, nbytes, tuple(range(0, 4 * n, 4)))
                out[TimedCollective("inside", kind, nbytes, n)] = inside
                out[TimedCollective("between", kind, nbytes, n)] = between
    pairs: tuple[tuple[Literal["inside", "between"], int], ...] = (("inside", 1), ("between", 4))
    for link, other in pairs:
        for nbytes in (10**5, 10**7):
            out[TimedMessage(link, nbytes)] = fast.message_seconds(nbytes, 0, other)
    return out


def trained(at: MeasuredMachine) -> dict[Timed, float]:
    fast = speeds_of(cluster(TRUE | PEAK | shared(at), at), "fp32", 4)
    assert fast is not None
    layouts = {Trained("replicas"): at.replicas, Trained("stages"): at.stages}
    return {what: predict(work, fast).seconds for what, work in layouts.items()}


def shared(at: MeasuredMachine) -> dict[str, float]:
    """Return the constants of cores that both compute and send: nothing is hidden, and one core alone is faster."""
    hidden = ("overheads.exposed", "overheads.exposed_sums", "overheads.exposed_tp")
    return dict.fromkeys(hidden, 1.0) | {"kernels.alone": 1.5} if at.cores else {}


PEAK = {
    "tflops.fp32": 0.08, "efficiency": 1.0, "memory_gb_per_s": 16.0, "kernels.attention": 0.25,
}  # fmt: skip
"""The measured values: nothing is faster than the fastest product and the copy."""


@pytest.mark.parametrize("cores", [None, 2])
def test_the_fit_recovers_known_constants(cores: int | None) -> None:
    at = machine(cores)
    expected = TRUE | PEAK | shared(at)
    found = fitted(one_round(at), at)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-2)


def test_if_short_sides_explain_all_seconds_efficiency_is_that_of_the_fastest_product() -> None:
    """As on a small device, short sides explain the seconds, so the efficiency is that of the fastest product."""
    at = machine(None)
    timed = one_round(at)
    for what in (w for w in timed if isinstance(w, TimedProduct) and w.precision == "fp32"):
        p = what.product
        timed[what] = p.flops / 0.08e12 * 1000 * (1 / p.m + 1 / p.n + 1 / p.k) ** 2
    found = fitted(timed, at)
    assert found["efficiency"] == 1.0
    assert 0 < found["kernels.small"] < float("inf")


def test_without_measurements_between_nodes_their_links_equal_those_inside() -> None:
    at = machine(2)
    timed = {w: s for w, s in one_round(at).items() if getattr(w, "link", "") != "between"}
    found = fitted(timed, at)
    assert found["links.between.latency_us"] == found["links.inside.latency_us"]
    assert found["links.between.gb_per_s"] == found["links.inside.gb_per_s"]


def test_constants_are_fitted_to_the_middle_batch_and_spreads_are_those_of_batches() -> None:
    """Here a batch is a round; the peaks are 80, 40, 20 and twice 80/3 GFLOP per second."""
    at = machine(2)
    found = {c.key: c for c in constants([one_round(at, slow) for slow in (1, 2, 3, 3, 4)], at)}
    assert found["tflops.fp32"].value == pytest.approx(0.08 / 3, rel=1e-3)
    low, high = (0.08 / 4 + 0.08 / 3) / 2, (0.08 + 0.08 / 2) / 2
    assert found["tflops.fp32"].spread == pytest.approx((high - low) / (0.08 / 3), rel=1e-2)
    assert found["efficiency"].spread == pytest.approx(0, abs=1e-6)  # a slow machine slows all products alike


def test_rounds_that_differ_are_refused_by_name() -> None:
    found = (FittedConstant("efficiency", 0.91, 0.02), FittedConstant("links.inside.latency_us", 412.3, 0.42))
    assert refusal(found, 0.0, 0.3) == (
        "calibrate: nothing is written, because the machine is too busy: links.inside.latency_us 412 (spread 42%); "
        "at most 30%. Run it again while the machine is idle"
    )
    assert refusal(found[:1], 0.1, 0.3) == ""


def test_cores_that_other_processes_use_are_reported() -> None:
    """Other processes slow all rounds alike, so no spread shows them."""
    assert taken([{Taken(): 0.5}, {Taken(): 0.4}, {Taken(): 0.9}]) == 0.5
    assert refusal((), 0.5, 0.3) == (
        "calibrate: nothing is written, because the machine is too busy: other processes used the cores 50% of the "
        "time; at most 30%. Run it again while the machine is idle"
    )


def test_more_rounds_are_divided_among_the_same_number_of_batches() -> None:
    """Every third round takes 3 times as long, so a third of each batch does, and each batch has the same mean."""
    at = machine(2)
    rounds = [one_round(at, 3.0 if n % 3 == 2 else 1.0) for n in range(30)]
    found = {c.key: c for c in constants(rounds, at)}
    assert max(c.spread for c in found.values()) == pytest.approx(0, abs=1e-6)
    assert found["tflops.fp32"].value == pytest.approx(0.08 / (5 / 3), rel=1e-3)


def test_the_spread_of_a_tiny_constant_is_relative_to_a_floor() -> None:
    """Launches take 0.1 to 0.3 us; their spread is relative to 1 us, because less does not matter."""
    at = machine(2)
    rounds = [one_round(at) | {Moved("tiny", TINY): 60 * us * 1e-6} for us in (0.1, 0.1, 0.2, 0.3, 0.3)]
    launch = next(c for c in constants(rounds, at) if c.key == "kernels.launch_us")
    assert (launch.value, launch.spread) == (pytest.approx(0.2), pytest.approx(0.2))


def test_the_file_is_one_that_is_read(tmp_path: object) -> None:
    at = machine(2)
    found = constants([one_round(at)] * 5, at)
    text = cluster_file(found, at, ["Measured."], 2)
    read = yaml.safe_load(text)
    assert read.pop("defaults") == ["unknown", "_self_"]
    written = Cluster.model_validate(read)
    assert written == cluster({c.key: float(number(c.value)) for c in found}, at)
    rates = "tflops: {fp32: 0.08, bf16: 0.2}  # the fastest products; spreads 0%, 0%\n"
    assert rates in text
    network = "  between: {latency_us: 900, gb_per_s: 0.5, message_gb_per_s: 1}  # "
    assert f"{network}the same, between nodes; spreads 0%, 0%, 0%\n" in text
    assert f"{network}as inside: there is one node\n" in cluster_file(found, at, ["Measured."], 1)
    assert all("#" in line for line in text.splitlines() if ": " in line and not line.startswith("name"))


@pytest.mark.parametrize("name", ["here"])
def test_shipped_files_of_this_kind_are_whole(name: str) -> None:
    told = compose([f"cluster={name}"]).job.cluster
    assert told.cores_per_node == 2
    assert speeds_of(told, "fp32") is not None
