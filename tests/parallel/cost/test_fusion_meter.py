"""What a compiler saves in a module: bytes between fused operations, and tensors that it does not keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.parallel.cost.memory import BackwardMeter
from launcher.plan.plan import Plan
from launcher.plan.values.model_graph import Compiled
from launcher.planner.plan_job import plan_job
from tests.plan.made import job as asked

T = 4 * 8 * 16
"""Bytes of an activation."""


class Net(nn.Module):
    def __init__(self, run: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.first, self.second = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def compiled(run: Callable[[Net, Tensor], Tensor]) -> Compiled:
    with torch.device("meta"):
        measured = BackwardMeter().measure(Net(run), (torch.empty(8, 16),), {})
    assert measured is not None
    return measured.backward.compiled


def test_fused_operations_between_two_products_read_and_write_once() -> None:
    found = compiled(lambda net, x: net.second(net.first(x).sin().cos().exp()))
    assert found.forward.moved == 6 * T - 2 * T  # three read and write; fused, they do so once
    assert found.forward.kernels == 2


@pytest.mark.parametrize(
    ("run", "saved"),
    [
        (lambda net, x: net.second(F.silu(net.first(x)) * net.first(x)), T),  # silu's result, recomputed from its input
        (lambda net, x: net.second(net.first(x).relu()), 0),  # the second product needs it
        (lambda net, x: net.second(x).relu(), 0),  # it is an output
        (lambda net, x: net.first(x).sin().cos().sum(0), T),  # cos keeps sin's result, which is recomputed
        (lambda net, x: net.first(x).exp().sin(), 0),  # exp saves only its result
        (lambda net, x: net.second(net.first(x)), 0),
    ],
    ids=["of another", "taken", "returned", "a chain", "of nothing saved", "products"],
)
def test_values_computed_from_saved_tensors_are_not_saved(run: Callable[[Net, Tensor], Tensor], saved: int) -> None:
    assert compiled(run).saved == saved


def plan(*overrides: str) -> Plan:
    return plan_job(asked("model=lm", "cluster=h100_sxm", *overrides))


@pytest.mark.parametrize("more", [[], ["parallel.pipeline.stages=2", "launch.nproc=2"]], ids=["one stage", "two"])
def test_a_compiled_plan_takes_less_time_and_memory(more: list[str]) -> None:
    eager, graph = plan(*more), plan("train.compile={}", *more)
    other = plan("train.compile={backend: aot_eager}", *more)
    assert graph.estimate.memory[0].activations < eager.estimate.memory[0].activations
    assert other.estimate.memory == eager.estimate.memory
    seconds = [p.estimate.step.seconds if p.estimate.step is not None else 0.0 for p in (graph, eager, other)]
    assert seconds[0] < seconds[1] == seconds[2]
