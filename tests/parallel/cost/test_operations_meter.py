from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from launcher.parallel.cost.kernels import ForwardMeter
from launcher.parallel.cost.memory import BackwardMeter
from launcher.plan.values.operations import Operations, Product


def forward(run: Callable[[], object]) -> Operations:
    with torch.device("meta"), ForwardMeter(()) as meter:
        run()
    return meter.operations.since(0)


def test_a_product_is_noted_with_its_sides_and_its_dtype() -> None:
    done = forward(lambda: torch.empty(6, 4, dtype=torch.bfloat16) @ torch.empty(4, 5, dtype=torch.bfloat16))
    assert done == Operations(((Product(6, 5, 4, 1, 2), 1),), kernels=1)


def test_an_elementwise_operation_reads_and_writes_and_a_view_does_nothing() -> None:
    x = torch.empty(10, 3, device="meta")
    assert forward(lambda: x + x) == Operations(moved=3 * 120, kernels=1)
    assert forward(lambda: x.t().reshape(3, 2, 5)[0]) == Operations()


def test_attention_counts_what_is_not_masked() -> None:
    q = torch.empty(2, 4, 16, 8, device="meta")
    assert forward(lambda: F.scaled_dot_product_attention(q, q, q)).attention == 2 * 4 * (4 * 16 * 16 * 8)
    causal = forward(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert causal.attention == 2 * 4 * (4 * 16 * 16 * 8) // 2


class Net(nn.Module):
    """Products, a bias, a norm and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 36, 20), nn.LayerNorm(20)
        self.down = nn.Linear(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.norm(self.up(self.conv(x).relu().flatten(1))))
        return out


@pytest.mark.parametrize("learns", [True, False])
def test_flops_are_those_of_torchs_counter(learns: bool) -> None:
    """The reference counts while real tensors run."""
    real = Net()
    x = torch.randn(5, 3, 6, 6, requires_grad=True)
    for p in real.up.parameters():
        p.requires_grad_(learns)
    with FlopCounterMode(display=False) as ahead:
        out = real(x)
    with FlopCounterMode(display=False) as back:
        out.sum().backward()

    measured = BackwardMeter().measure(real.to("meta"), (torch.empty(5, 3, 6, 6),), {})
    assert measured is not None
    assert measured.forward.flops == ahead.get_total_flops()
    assert measured.backward.operations.flops == back.get_total_flops()
