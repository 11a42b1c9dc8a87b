"""Attention on meta tensors keeps for backward what it keeps on this machine; norms keep what CUDA keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.parallel.cost.kernels import ForwardMeter, SupportedKernels, counted_as
from launcher.plan.plan import Plan
from launcher.planner import device_kernels
from launcher.planner.plan_job import plan_job
from tests.plan.made import job as asked

MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "bool": lambda: torch.ones(40, 64, dtype=torch.bool),
    "bool of each sample": lambda: torch.ones(2, 1, 40, 64, dtype=torch.bool),
    "added": lambda: torch.zeros(40, 64),
    "of 3 dims, which no fused kernel takes": lambda: torch.zeros(4, 40, 64),
    "trained, which none takes either": lambda: torch.zeros(40, 64, requires_grad=True),
}


def saved(device: str, mask: Callable[[], Tensor | None]) -> int:
    """Bytes that attention from 40 positions to 64 keeps."""
    with torch.device(device):
        q, k, v = (torch.zeros(2, 4, n, 8, requires_grad=True) for n in (40, 64, 64))
        with ForwardMeter(()) as meter:
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask())
    return meter.saved


@pytest.mark.parametrize("mask", MASKS)
def test_as_many_bytes_are_saved_on_meta_as_on_a_cpu(mask):
    assert saved("meta", MASKS[mask]) == saved("cpu", MASKS[mask])


def norm(fused: bool, weight: torch.dtype = torch.bfloat16) -> tuple[int, Tensor]:
    """The bytes that a bf16 norm of 30 rows of 64 keeps, without its weight, and its output."""
    with torch.device("meta"), counted_as(SupportedKernels(norms=fused)):
        x, scale = torch.zeros(2, 15, 64, dtype=torch.bfloat16, requires_grad=True), torch.ones(64, dtype=weight)
        with ForwardMeter((scale,)) as meter:
            out = F.rms_norm(x, (64,), scale)
    return meter.saved, out


def test_one_kernel_keeps_its_input_and_two_numbers_a_row() -> None:
    """CUDA's kernel keeps one number per row: see the derivatives of torch's ``_fused_rms_norm``."""
    kept, out = norm(fused=True)
    assert kept == 2 * 30 * 64 + 2 * 4 * 30
    assert (out.shape, out.dtype, out.requires_grad) == ((2, 15, 64), torch.bfloat16, True)


def test_a_norm_that_is_not_fused_keeps_more_bytes() -> None:
    assert norm(fused=False)[0] > 2 * 2 * 30 * 64


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch warns on CPUs too
def test_a_weight_of_another_dtype_takes_it_to_pieces_on_every_device() -> None:
    assert norm(fused=True, weight=torch.float32)[0] == norm(fused=False, weight=torch.float32)[0]


def plan(*overrides: str) -> Plan:
    return plan_job(asked("model=lm", "data=text_bpe", *overrides))


@pytest.mark.parametrize(
    ("there", "fused"),
    [
        ([], False),
        (["launch.device=cuda"], True),
        (["cluster=h100_sxm"], True),
        (["cluster=h100_sxm", "launch.device=cpu"], False),
        (["cluster=here"], False),
    ],
)
def test_activations_are_those_of_the_devices_that_are_planned_for(there: list[str], fused: bool) -> None:
    """A fused fp32 norm keeps only its input; in pieces, it also keeps the divisor and the quotient."""
    least, most = plan("launch.device=cuda"), plan("launch.device=cpu")
    found = plan(*there).estimate.memory[0].activations
    assert least.estimate.memory[0].activations < most.estimate.memory[0].activations
    assert found == (least if fused else most).estimate.memory[0].activations


def test_auto_plans_for_the_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local devices count if each rank has one, but not for a named cluster or a job that runs elsewhere."""
    on_cuda, on_cpu = plan("launch.device=cuda"), plan("launch.device=cpu")
    ranks = on_cpu.sizes.grid.size
    monkeypatch.setattr(device_kernels, "local_accelerators", lambda: ("cuda", ranks))
    assert plan().estimate.memory == on_cuda.estimate.memory
    assert plan("cluster=here").estimate.memory == on_cpu.estimate.memory
    assert plan("launch.slurm.partition=gpu").estimate.memory == on_cpu.estimate.memory
    monkeypatch.setattr(device_kernels, "local_accelerators", lambda: ("cuda", ranks - 1))
    assert plan().estimate.memory == on_cpu.estimate.memory


def test_the_plan_says_which_attention_it_counts() -> None:
    def said(*overrides: str) -> list[str]:
        return [n.text for n in plan(*overrides).notes if n.key == "launch.device"]

    half = "attention is estimated with cuDNN's or flash's kernel, norms with CUDA's"
    assert said("launch.device=cuda", "train.precision=bf16") == [f"{half}: cuda"]
    assert said("cluster=h100_sxm", "train.precision=bf16") == [f"{half}: auto, on devices of h100_sxm"]
    full = "attention is estimated with the memory-efficient kernel, norms with CUDA's: cuda"
    assert said("launch.device=cuda") == [full]
    assert said("launch.device=cpu") == []


@pytest.mark.parametrize("more", [{"dropout_p": 0.1}, {"enable_gqa": True}], ids=["dropout", "groups"])
def test_a_device_drops_out_and_reads_groups_in_one_kernel(more: dict[str, Any]) -> None:
    """The kernel keeps its inputs, its output, and one number for each query."""
    with torch.device("meta"), counted_as(device_kernels.kernels_of("cuda", here=False)):
        q, k, v = (torch.zeros(2, h, 40, 8, requires_grad=True) for h in (4, 2 if "enable_gqa" in more else 4, 4))
        v = v[:, : k.shape[1]]
        with ForwardMeter((q, k, v)) as meter:
            F.scaled_dot_product_attention(q, k, v, is_causal=True, **more)
    assert meter.saved == 4 * 2 * 4 * 40 * (8 + 1)


def test_a_device_without_a_kernel_for_attention_keeps_its_scores() -> None:
    """Torch decomposes attention there: the weights of 40 positions for each of 64 are kept."""
    with counted_as(SupportedKernels(attention=False)):
        in_pieces = saved("meta", MASKS["none"])
    scores = 4 * 2 * 4 * 40 * 64
    assert saved("meta", MASKS["none"]) < scores < in_pieces


def test_a_device_that_torch_does_not_know_here_is_planned_with_the_kernels_of_cuda() -> None:
    assert (
        device_kernels.kernels_of("npu", here=False)
        == device_kernels.kernels_of("cuda", here=True)
        == SupportedKernels(norms=True, wide=True)
    )
    assert device_kernels.kernels_of("cpu", here=True) == SupportedKernels()
