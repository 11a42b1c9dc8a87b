"""What a recording loses of a forward is found, and what it keeps has the gradients of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.errors import RequestError
from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.resolve import assign
from launcher.extras.device_matrix.rules.table import rule_of
from launcher.extras.device_matrix.run.program import StageGroups, StageProgram
from launcher.extras.device_matrix.run.record import OTHERWISE, record
from launcher.extras.device_matrix.sharded_graph import sharded
from launcher.parallel.model_state.deep_copy import copied

Forward = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A layer, followed by an unusual function."""

    def __init__(self, odd: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.layer(x)).tanh()


# changes in place that autograd sees


def _slices(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, ::2] = x[:, 1::2] * 2
    out[:, 1::2] = x[:, ::2]
    return out


def _row(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = 0
    return y


def _masked(x: Tensor) -> Tensor:
    y = x * 2
    return y.masked_fill_(x > 0, 0.5) + x


def _parts(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 2:] += x[:, :4]
    y[:, :3].mul_(2)
    return y


def _viewed(x: Tensor) -> Tensor:
    y = x * 2
    flat = y.view(-1)
    y.relu_()
    return flat.view(x.shape) * x


def _sum_of_places(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1] = x[:, 0]
    y[:, 0].add_(x[:, 1])
    return y * x


# gradients that end


def _copied_without_gradient(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    with torch.no_grad():
        y.copy_(x)
    return x * y


def _detached(x: Tensor) -> Tensor:
    return x + (x.relu() - x).detach()


def _enabled_within(x: Tensor) -> Tensor:
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 3
    return a * b


def _cosine(x: Tensor) -> Tensor:
    return F.cosine_similarity(x, x.flip(0), dim=-1).unsqueeze(-1) * x


KEPT: list[Forward] = [
    _slices, _row, _masked, _parts, _viewed, _sum_of_places, _copied_without_gradient, _detached, _enabled_within,
    _cosine,
]  # fmt: skip


@pytest.mark.parametrize("odd", KEPT)
def test_gradients_are_those_of_the_model(odd: Forward) -> None:
    module, x = Net(odd), torch.randn(4, 6, dtype=torch.float64)
    want = _gradients(module, module(x))

    graph = record(copied(module).to("meta"), [x.to("meta")])
    rules = [rule_of(node, graph) for node in graph.nodes]
    whole = {v: TensorLayout.replicated(len(graph.values[v].shape), 1) for v in graph.inputs}
    strategies = assign(graph, rules, 1, written={}, at_inputs=whole, rests={})
    program = StageProgram(
        sharded(graph, rules, strategies, known_layouts=whole, outputs=[None]), StageGroups(0, {}), torch.device("cpu")
    )
    (out,), _ = program.run([x], dict(module.named_parameters()))
    for name, gradient in _gradients(module, out).items():
        torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-14)


def _gradients(module: nn.Module, out: Tensor) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    return dict(zip(named, torch.autograd.grad(out.pow(2).sum(), list(named.values())), strict=True))


# what a recording loses


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda g: g * 2)
    return x * 2


def _behind(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.mul_(2)
    return y * y


def _alias(x: Tensor) -> Tensor:
    y = x * 2
    y.detach()[0] = 1
    return y


def _cut(x: Tensor) -> Tensor:
    y = x * 2
    y.detach_()
    return y * x


def _seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = torch.randn(6, dtype=x.dtype)
    return x + noise


class _Counts(list[int]):
    """A forward that counts its calls."""

    def __call__(self, x: Tensor) -> Tensor:
        self.append(len(self))
        return x * len(self)


def _by_python(x: Tensor) -> Tensor:
    import random

    return x * random.random()


GRADIENT = "the gradient of layer.weight differs from the result of its operators alone"
LOST: dict[str, tuple[Forward, str]] = {
    "function": (_Reversed.apply, GRADIENT),
    "tensor hook": (_hooked, GRADIENT),
    "no_grad": (_behind, "mul_ changes a tensor in place where autograd does not see it"),
    "alias": (_alias, "copy_ changes a tensor in place where autograd does not see it"),
    "detach_": (_cut, "detach_ changes a tensor in place where autograd does not see it"),
    "seed": (_seeded, "output 0 differs from the result of its operators alone"),
    "calls": (_Counts(), "the forward or the backward changes odd with every call"),
    "random": (_by_python, "the forward seeds torch's random stream, or draws from Python's or numpy's"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_forward_that_operators_do_not_reproduce_is_refused(name: str) -> None:
    odd, text = LOST[name]
    with pytest.raises(RequestError) as error:
        record(Net(odd).to("meta"), [torch.empty(4, 6, device="meta", dtype=torch.float64)])
    (problem,) = error.value.problems
    assert problem.text == f"the model does more than operators do: {text}; {OTHERWISE}"


def test_hooks_of_modules_that_compute_are_in_the_recording() -> None:
    module = Net(torch.relu).to("meta")
    module.layer.register_forward_hook(lambda module, args, out: out * 2)
    graph = record(module, [torch.empty(4, 6, device="meta", dtype=torch.float64)])
    assert [node.op for node in graph.nodes] == ["linear", "mul.Tensor", "relu", "tanh"]


def test_a_backward_hook_is_refused() -> None:
    module = Net(torch.relu).to("meta")
    module.layer.register_full_backward_hook(lambda module, made, given: tuple(g * 2 for g in made))
    with pytest.raises(RequestError, match="the gradient of input 0 differs from the result of its operators alone"):
        record(module, [torch.empty(4, 6, device="meta", dtype=torch.float64, requires_grad=True)])
