"""The global norm is that of the exact values, not of a sum rounded to fp32."""

from __future__ import annotations

import torch

from launcher.parallel.grad_norm import Norm


def test_a_million_fp32_gradients_have_the_norm_of_their_exact_sum() -> None:
    p = torch.zeros(1_000_000, requires_grad=True)
    p.grad = torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) ** 3
    want = p.grad.double().square().sum().item()
    assert abs(Norm(((p, 1.0),), ()).squared().item() - want) <= 1e-12 * want


def test_a_number_that_comes_along_is_the_same_afterwards_and_so_is_the_norm() -> None:
    p = torch.zeros(5, 3, requires_grad=True)
    p.grad = torch.arange(15.0).reshape(5, 3)
    norm, number = Norm(((p, 0.5),), ()), torch.tensor(1 / 3, dtype=torch.float64)
    along, square = norm.squared_beside(number)
    assert torch.equal(along, number)
    assert torch.equal(square, norm.squared())
    assert along.shape == square.shape == ()


def test_a_rank_without_gradients_brings_its_number_all_the_same() -> None:
    along, square = Norm((), ()).squared_beside(torch.tensor(2.0, dtype=torch.float64))
    assert (along.item(), square.item()) == (2.0, 0.0)
