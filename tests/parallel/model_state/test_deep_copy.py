"""A copy of a model is independent of it, also where functions refer to its modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.parallel.model_state.deep_copy import copied
from launcher.planner.plan_job import plan_job
from tests.parallel.trace.test_tensor_side_effects import net


def cell(lin: nn.Linear) -> Any:
    plain = lin.forward
    return lambda x: plain(x) + lin.weight.sum()


def default(lin: nn.Linear) -> Any:
    return lambda x, m=lin, plain=lin.forward: plain(x) + m.weight.sum()


def kept(lin: nn.Linear) -> Any:
    def forward(x: Tensor, *, all: tuple[nn.Module, ...] = (lin,)) -> Tensor:
        return type(lin).forward(lin, x) + all[0].weight.sum()

    return forward


def partly(lin: nn.Linear) -> Any:
    def forward(m: nn.Linear, plain: Any, x: Tensor) -> Tensor:
        return plain(x) + m.weight.sum()

    return partial(forward, lin, lin.forward)


@pytest.mark.parametrize("wrapped", [cell, default, kept, partly])
def test_a_forward_of_its_own_runs_the_weights_of_the_copy(wrapped):
    lin, x = nn.Linear(3, 3), torch.randn(2, 3)
    lin.forward = wrapped(lin)
    lin.register_forward_hook(lambda m, args, out: out + lin.bias.sum())
    twin = copied(lin)
    assert torch.equal(twin(x), lin(x))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert twin(x).abs().max() == 0
    assert lin(x).abs().max() > 0


def test_functions_in_a_list_run_the_weights_of_the_copy():
    model = nn.Sequential(nn.Linear(3, 3))
    model.steps = [lambda x: model[0](x), lambda x: x + model[0].weight.sum()]
    model.named = {"last": lambda x: model[0](x)}
    twin = copied(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert [step(torch.ones(1, 3)).abs().max().item() for step in twin.steps] == [0, 1]
    assert twin.named["last"](torch.ones(1, 3)).abs().max() == 0


def test_functions_that_hold_nothing_of_the_model_stay_what_they_are():
    lin = nn.Linear(3, 3)
    hook = lin.register_forward_hook(lambda m, args, out: out * 2)
    assert copied(lin)._forward_hooks[hook.id] is lin._forward_hooks[hook.id]


def test_weights_inside_a_forward_of_its_own_are_planned_as_used():
    plan = plan_job(net("Wrapped", "level3"))
    assert [g.idle for g in plan.groups] == [()] * 4
