"""Attention with fewer heads for keys and values than for queries."""

from __future__ import annotations

import pytest
import torch

from launcher.models import language_model as module
from launcher.models.language_model import attention, grouped_heads


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float64, head: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, h, 6, head, dtype=dtype, device=device, requires_grad=True) for h in (4, 2, 2)]


def test_groups_read_by_the_kernel_are_the_repeated_heads(monkeypatch):
    q, k, v = inputs()
    repeated = attention(q, k, v, 2, None)
    wanted = torch.autograd.grad(repeated.square().sum(), (q, k, v))
    monkeypatch.setattr(module, "_reads_groups", lambda q, seen: True)
    grouped = attention(q, k, v, 2, None)
    found = torch.autograd.grad(grouped.square().sum(), (q, k, v))
    torch.testing.assert_close([grouped, *found], [repeated, *wanted], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("device", "dtype", "head", "masked", "planned", "grouped"),
    [
        ("meta", torch.bfloat16, 8, False, True, True),
        ("meta", torch.bfloat16, 8, False, False, False),
        ("meta", torch.float32, 8, False, True, False),
        ("meta", torch.bfloat16, 256, False, True, False),
        ("meta", torch.float16, 8, False, True, False),
        ("meta", torch.bfloat16, 8, True, True, False),
        ("cpu", torch.bfloat16, 8, False, True, False),
    ],
)
def test_only_kernels_of_cuda_in_bfloat16_read_groups(device, dtype, head, masked, planned, grouped):
    q = inputs(device, dtype, head)[0]
    with grouped_heads(planned):
        assert module._reads_groups(q, torch.ones(6, 6, dtype=torch.bool) if masked else None) is grouped
