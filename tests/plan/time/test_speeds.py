"""Seconds computed by hand: every figure is derived here from the numbers of the cluster."""

from __future__ import annotations

import pytest

from launcher.job.schema.cluster import Cluster
from launcher.plan.time.speeds import Speeds, speeds_of
from launcher.plan.values.operations import Operations, Product
from tests.plan.made import job

CLUSTER = Cluster.model_validate({
    "devices_per_node": 4, "tflops": {"fp32": 10, "bf16": 100}, "efficiency": 0.5, "memory_gb_per_s": 1000,
    "links": {"inside": {"latency_us": 2, "gb_per_s": 200}, "between": {"latency_us": 50, "gb_per_s": 10}},
    "kernels": {"small": 0, "attention": 0.25, "memory": 0.8, "launch_us": 5},
})  # fmt: skip


def speeds() -> Speeds:
    found = speeds_of(CLUSTER, "bf16")
    assert found is not None
    return found


def test_an_unknown_cluster_has_no_speeds() -> None:
    assert speeds_of(Cluster(), "fp32") is None


def test_a_precision_that_is_not_listed_is_as_slow_as_the_slowest() -> None:
    found = speeds_of(CLUSTER, "fp16")
    assert found is not None
    assert found.peak == 10e12


def test_a_large_product_takes_its_flops_and_a_thin_one_its_bytes() -> None:
    large, thin = Product(4096, 4096, 4096, 1, 2), Product(4096, 1, 4096, 1, 2)
    assert speeds().device_seconds(Operations(((large, 3),))) == pytest.approx(3 * 2 * 4096**3 / 50e12)
    assert speeds().device_seconds(Operations(((thin, 1),))) == pytest.approx(2 * (4096**2 + 2 * 4096) / 800e9)


def test_short_sides_make_a_product_slower() -> None:
    cluster = CLUSTER.model_copy(update={"kernels": CLUSTER.kernels.model_copy(update={"small": 128})})
    found = speeds_of(cluster, "bf16")
    assert found is not None
    product = Operations(((Product(4096, 256, 4096, 1, 2), 1),))
    slower = 1 + 128 * (2 / 4096 + 1 / 256)
    assert found.device_seconds(product) == pytest.approx(2 * 4096**2 * 256 / 50e12 * slower)


def test_bytes_and_attention_have_rates_of_their_own() -> None:
    done = Operations(moved=8_000_000, attention=25_000_000)
    assert speeds().device_seconds(done) == pytest.approx(1e-5 + 1e-6)
    assert speeds().host_seconds(1000) == pytest.approx(5e-3)


def test_a_ring_inside_a_node() -> None:
    took = speeds().collective_seconds("all_gather", 400_000_000, (0, 1, 2, 3))
    assert took == pytest.approx(3 * 2e-6 + 0.75 * 400e6 / 200e9)
    twice = speeds().collective_seconds("all_reduce", 400_000_000, (0, 1, 2, 3))
    assert twice == pytest.approx(3 * 2e-6 + 2 * 0.75 * 400e6 / 200e9)


def test_a_pair_across_nodes_has_the_network_and_not_the_links_of_a_node() -> None:
    """Two ranks on two nodes use the network adapters, even if their rank numbers are adjacent."""
    near = speeds().collective_seconds("all_gather", 100_000_000, (2, 3))
    far = speeds().collective_seconds("all_gather", 100_000_000, (3, 4))
    assert near == pytest.approx(2e-6 + 0.5 * 100e6 / 200e9)
    assert far == pytest.approx(50e-6 + 0.5 * 100e6 / 10e9)


def test_a_group_has_the_adapters_of_its_members_on_a_node() -> None:
    whole = speeds().collective_seconds("reduce_scatter", 80_000_000, tuple(range(8)))
    strided = speeds().collective_seconds("reduce_scatter", 80_000_000, (0, 2, 4, 6))
    assert whole == pytest.approx(7 * 50e-6 + 7 / 8 * 80e6 / 40e9)
    assert strided == pytest.approx(3 * 50e-6 + 3 / 4 * 80e6 / 20e9)


def test_few_devices_of_a_mesh_have_few_of_its_lines() -> None:
    """In a mesh of four devices there is a line between each two of them.

    A pair uses one of a device's three lines, three devices use two of them each, and a message uses one.
    """
    links = CLUSTER.links
    assert links is not None
    mesh = links.model_copy(update={"inside": links.inside.model_copy(update={"mesh": True})})
    found = speeds_of(CLUSTER.model_copy(update={"links": mesh}), "bf16")
    assert found is not None
    assert found.collective_seconds("all_gather", 60_000_000, (0, 1)) == pytest.approx(2e-6 + 30e6 / (200e9 / 3))
    assert found.collective_seconds("all_gather", 60_000_000, (0, 1, 3)) == pytest.approx(4e-6 + 40e6 / (400e9 / 3))
    assert found.collective_seconds("all_gather", 60_000_000, (0, 1, 2, 3)) == pytest.approx(6e-6 + 45e6 / 200e9)
    assert found.message_seconds(60_000_000, 0, 3) == pytest.approx(2e-6 + 60e6 / (200e9 / 3))

    # between nodes the adapters count, also with one member per node
    assert found.collective_seconds("all_gather", 80_000_000, (0, 4)) == pytest.approx(50e-6 + 40e6 / 10e9)
    assert found.collective_seconds("all_gather", 80_000_000, tuple(range(8))) == pytest.approx(7 * 50e-6 + 70e6 / 40e9)


MEASURED_910B = {2: (38, 18), 4: (64, 30), 8: (149, 72)}
"""GB/s of a full tensor: all-gather and all-reduce over that many devices of an Atlas 800T A2 (HCCL, CANN 8.0)."""


@pytest.mark.parametrize("ranks", MEASURED_910B)
def test_collectives_of_ascend_910b_take_what_was_measured(ranks: int) -> None:
    found = speeds_of(job("cluster=ascend_910b").cluster, "bf16")
    assert found is not None
    for kind, measured in zip(("all_gather", "all_reduce"), MEASURED_910B[ranks], strict=True):
        took = found.collective_seconds(kind, 1 << 30, tuple(range(ranks)))
        assert (1 << 30) / took / 1e9 == pytest.approx(measured, rel=0.2)


def test_alone_nothing_is_sent() -> None:
    assert speeds().collective_seconds("all_reduce", 10**9, (3,)) == 0
    assert speeds().message_seconds(10**9, 2, 2) == 0


def test_messages_go_over_the_link_between_their_ranks() -> None:
    assert speeds().message_seconds(10_000_000, 0, 3) == pytest.approx(2e-6 + 10e6 / 200e9)
    assert speeds().message_seconds(10_000_000, 0, 4) == pytest.approx(50e-6 + 10e6 / 10e9)


def test_ranks_are_on_the_nodes_that_they_are_started_on() -> None:
    """Two ranks start on each node of four devices, so ranks 1 and 2 are on different nodes."""
    sparse = speeds_of(CLUSTER, "bf16", per_node=2)
    assert sparse is not None
    assert sparse.message_seconds(10_000_000, 1, 2) == pytest.approx(50e-6 + 10e6 / 10e9)
    assert sparse.collective_seconds("all_gather", 80_000_000, (0, 1, 2, 3)) == pytest.approx(
        3 * 50e-6 + 3 / 4 * 80e6 / 20e9
    )


def test_a_product_without_elements_takes_no_time() -> None:
    assert speeds().device_seconds(Operations(((Product(0, 10, 16, 1, 4), 1),))) == 0.0
