"""Tensor hooks that use weights are distinguished from those that scale, count or record gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from launcher.parallel.model_state.hooks import uses_weights


class Has(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.calls = nn.Linear(2, 2), 0.5, 0

    def counts(self, g: Any) -> Any:
        self.calls += 1
        return g * self.scale

    def multiplies(self, g: Any) -> Any:
        return g @ self.linear.weight


def hooks() -> dict[str, tuple[Callable[[Any], Any], bool]]:
    has, k, mask = Has(), 0.5, torch.ones(2)
    x = torch.ones(2, requires_grad=True)
    y, inner = has.linear(x), has.linear

    def adds_one(g: Any) -> Any:
        has.calls += 1
        return g

    def solves(g: Any) -> Any:
        def again(v: Any) -> Any:
            return torch.autograd.grad(y, x, v, retain_graph=True)[0]

        return again(g)

    return {
        "a number": (lambda g: g * k, False),
        "a mask": (lambda g: g * mask, False),
        "a counter": (adds_one, False),
        "a method that counts": (has.counts, False),
        "a number of a module": (lambda g: g * has.scale, False),
        "a method that multiplies": (has.multiplies, True),
        "a layer": (lambda g: inner(g), True),
        "a layer of a module": (lambda g: has.linear(g), True),
        "a whole module": (lambda g: sum(p.sum() for p in has.parameters()) * g, True),
        "a graph": (solves, True),
        "nothing of Python": (torch.neg, False),
    }


@pytest.mark.parametrize("name", list(hooks()))
def test_a_hook_that_needs_weights_is_known(name):
    hook, needs = hooks()[name]
    assert uses_weights(hook) == needs
