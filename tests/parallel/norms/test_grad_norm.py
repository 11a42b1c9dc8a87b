"""The global norm is that of the numbers, not of a sum that fp32 has rounded."""

from __future__ import annotations

import torch

from launcher.parallel.norms.grad_norm import Norm


def test_a_million_fp32_gradients_have_the_norm_of_their_exact_sum() -> None:
    p = torch.zeros(1_000_000, requires_grad=True)
    p.grad = torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) ** 3
    want = p.grad.double().square().sum().item()
    assert abs(Norm(((p, 1.0),), ()).squared().item() - want) <= 1e-12 * want
