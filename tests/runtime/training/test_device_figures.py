"""What a step reports about its device: nothing that is unknown."""

from __future__ import annotations

import pytest
import torch

from launcher.planner.plan_job import plan_job
from launcher.runtime.training.throughput import PEAKS, DeviceFigures, device_figures, peak_flops
from tests.parity import job

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
    ],
)
def test_a_device_is_known_by_the_name_that_torch_tells(device: str, tera: float) -> None:
    assert peak_flops(device, "bfloat16") == tera * 1e12


@pytest.mark.parametrize(
    "device",
    ["cpu", "NVIDIA A10G", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla T4"],
)
def test_a_device_that_is_like_a_known_one_is_not_known(device: str) -> None:
    """The T4 supports half precision, but not bf16."""
    assert peak_flops(device, "bfloat16") is None


def test_no_row_of_the_table_hides_another() -> None:
    assert {name: peak_flops(name, "float16") for name, _ in PEAKS} == {n: p["float16"] * 1e12 for n, p in PEAKS}


def test_the_known_peak_of_half_precision_is_the_highest() -> None:
    assert all(p["float16"] > max(p.get(d, 0) for d in ("tf32", "float32", "float64")) for _, p in PEAKS)


def test_a_device_whose_peak_is_not_known_says_nothing_of_its_share() -> None:
    plan = plan_job(job())
    assert list(device_figures(plan, CPU).row(0.5)) == ["memory_mb"]


def test_the_share_is_of_one_device_and_one_second() -> None:
    """8 GFLOP in 4 s on a device of 16 GFLOP/s."""
    row = DeviceFigures(CPU, flops=8e9, peak=16e9).row(4.0)
    assert (row["tflops"], row["mfu"]) == (0.002, 0.125)


def test_each_rank_counts_its_own_part_of_a_step() -> None:
    plan = plan_job(job(parallel__grid__dp_replicate=2))
    assert device_figures(plan, CPU).flops == plan.estimate.flops / 2
