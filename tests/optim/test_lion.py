"""Lion compared with its paper, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from launcher.job.schema.optim import Lion
from launcher.optim.build import build_optimizer
from tests.optim.grouped import grouped

SETTINGS = Lion(name="lion", lr=0.125, betas=(0.5, 0.75), weight_decay=0.25)


def by_hand(weights: list[float], gradients: list[list[float]], decay: float) -> list[float]:
    """Algorithm 2 of arXiv 2302.06675 with Python numbers."""
    (now, kept), lr = SETTINGS.betas, SETTINGS.lr
    means = [0.0] * len(weights)
    for row in gradients:
        for i, g in enumerate(row):
            c = now * means[i] + (1 - now) * g
            sign = math.copysign(1.0, c) if c else 0.0
            weights[i] -= lr * (sign + decay * weights[i])
            means[i] = kept * means[i] + (1 - kept) * g
    return weights


@pytest.mark.parametrize(("shape", "decay"), [((1, 4), 0.25), ((4,), 0.0)], ids=["a matrix decays", "a vector not"])
def test_updates_are_those_of_the_paper(shape, decay):
    start = [1.0, -2.0, 3.0, 0.5]
    gradients = [[1.0, -1.0, 0.0, 2.0], [-3.0, 4.0, 0.0, 0.5], [-0.25, -8.0, 1.0, -0.125]]
    p = nn.Parameter(torch.tensor(start, dtype=torch.float64).view(shape))
    optimizer = build_optimizer(SETTINGS, grouped(SETTINGS, [("p", p)]))
    for row in gradients:
        p.grad = torch.tensor(row, dtype=torch.float64).view(shape)
        optimizer.step()
    want = by_hand(start, gradients, decay)
    torch.testing.assert_close(p.detach().flatten().tolist(), want, rtol=0, atol=1e-15)


def test_lion_keeps_one_tensor_for_each_parameter_that_has_had_a_gradient():
    p, idle = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = build_optimizer(SETTINGS, grouped(SETTINGS, [("p", p), ("idle", idle)]))
    p.grad = torch.ones(2, 3)
    optimizer.step()
    assert {key: tuple(t.shape) for key, t in optimizer.state[p].items()} == {"exp_avg": (2, 3)}
    assert idle not in optimizer.state
    assert torch.equal(idle, torch.ones(2, 3))


def test_a_complex_number_is_two_numbers_each_with_a_sign():
    p = nn.Parameter(torch.tensor([1 + 1j, 2 - 3j]))
    optimizer = build_optimizer(SETTINGS, grouped(SETTINGS, [("p", p)]))
    p.grad = torch.tensor([2 - 5j, -1 + 0j])
    optimizer.step()
    assert p.tolist() == [1 - 0.125 + (1 + 0.125) * 1j, 2 + 0.125 - 3j]
