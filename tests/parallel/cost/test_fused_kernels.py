"""Attention on meta tensors keeps for backward what it keeps on this machine, norms what they keep on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.parallel.cost.forward_cost import Meter
from launcher.parallel.cost.fused_kernels import fused_norms
from launcher.plan.plan import Plan
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
    """Bytes of attention from 40 positions to 64."""
    with torch.device(device):
        q, k, v = (torch.zeros(2, 4, n, 8, requires_grad=True) for n in (40, 64, 64))
        with Meter(()) as meter:
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask())
    return meter.saved


@pytest.mark.parametrize("mask", MASKS)
def test_as_many_bytes_are_saved_on_meta_as_on_a_cpu(mask):
    assert saved("meta", MASKS[mask]) == saved("cpu", MASKS[mask])


def norm(fused: bool, weight: torch.dtype = torch.bfloat16) -> tuple[int, Tensor]:
    """Bytes that the norm of 30 rows of 64 in bfloat16 keeps, its weight aside, and what comes of it."""
    with torch.device("meta"), fused_norms(fused):
        x, scale = torch.zeros(2, 15, 64, dtype=torch.bfloat16, requires_grad=True), torch.ones(64, dtype=weight)
        with Meter((scale,)) as meter:
            out = F.rms_norm(x, (64,), scale)
    return meter.saved, out


def test_one_kernel_keeps_its_input_and_two_numbers_a_row() -> None:
    """CUDA's keeps its input and one: derivatives of torch's _fused_rms_norm."""
    kept, out = norm(fused=True)
    assert kept == 2 * 30 * 64 + 2 * 4 * 30
    assert (out.shape, out.dtype, out.requires_grad) == ((2, 15, 64), torch.bfloat16, True)


def test_in_pieces_it_keeps_more() -> None:
    assert norm(fused=False)[0] > 2 * 2 * 30 * 64


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch says so, on CPUs too
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
    """A norm in float32 keeps its input, what it is divided by and the quotient, or its input: for each of 9."""
    least, most = plan("launch.device=cuda"), plan("launch.device=cpu")
    found = plan(*there).estimate.memory[0].activations
    assert least.estimate.memory[0].activations < most.estimate.memory[0].activations
    assert found == (least if fused else most).estimate.memory[0].activations
