"""How a sharded value propagates through the rest of the model: the rules, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.errors import RequestError
from launcher.parallel.tensor_parallel.propagate import follow
from launcher.parallel.trace import model_structure
from launcher.plan.tensor_parallel.module_strategies import resolve
from launcher.plan.tensor_parallel.sharded_operators import TensorParallelPlan
from launcher.plan.values.grid import Grid
from launcher.plan.values.tensor_spec import TensorSpec

COLUMN: dict[str, Any] = {"weight": ["tp", None]}
ROW: dict[str, Any] = {"weight": [None, "tp"]}
GRID = Grid.of(pp=1, dp_replicate=1, dp_shard=1, tp=2)


class Net(nn.Module):
    """Two linear layers with ``between`` them, which may use a replicated gain and a norm."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.RMSNorm(8)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.ones(8))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.between(self, self.up(x)))
        return out


def flow(net: nn.Module, operators: dict[str, Any], *shape: int) -> TensorParallelPlan:
    with torch.device("meta"):
        model = net
    found, problems = resolve(operators, model_structure.skeleton(model), GRID)
    assert problems == []
    return follow(model.to("meta"), found, 2, [TensorSpec(shape or (4, 10, 6), "float32")])


BOTH = {"up": COLUMN, "down": ROW}
GOOD = {
    "pointwise": lambda net, x: F.gelu(x) * 2 + x,
    "spread along it": lambda net, x: x * x.new_ones(1),
    "split into heads and back": lambda net, x: x.view(4, 10, -1, 2).transpose(1, 2).transpose(1, 2).flatten(2),
    "softmax over time": lambda net, x: x.softmax(1),
    "mean over time": lambda net, x: x.mean(1, keepdim=True).expand(4, 10, x.shape[2]),
    "attention by heads": lambda net, x: _attend(x),
    "attention by heads with a mask": lambda net, x: _attend(x, torch.ones(10, 10, dtype=torch.bool)),
    "a stack of copies": lambda net, x: torch.stack([x, x]).sum(0),
}


def _attend(x: Tensor, mask: Tensor | None = None) -> Tensor:
    h = x.view(4, 10, -1, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(h, h, h, mask, is_causal=mask is None).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("between", GOOD.values(), ids=GOOD)
def test_elementwise_code_between_cut_modules_keeps_the_cut(between):
    got = flow(Net(between), BOTH)
    assert [(s.arrives, s.takes, s.makes, s.sums, s.gives) for s in got.spreads] == [
        (None, None, 2, False, 2),
        (2, 2, None, True, None),
    ]
    assert (got.partial, got.output) == ((), None)


def test_a_whole_parameter_used_on_parts_has_a_term_of_its_gradient_on_each_rank():
    assert flow(Net(lambda net, x: x * net.gain), BOTH).partial == ("gain",)


def test_a_norm_on_a_part_of_the_time_has_terms_too_and_a_layer_that_takes_all_features_stays_whole():
    time = {"norm": {"input": [None, "tp", None], "output": [None, None, None]}}
    got = flow(Net(lambda net, x: net.norm(x)), time)
    assert (got.partial, [s.takes for s in got.spreads]) == (("norm.weight",), [1])


def test_a_linear_layer_that_is_not_named_passes_parts_of_the_time_on():
    got = flow(Net(lambda net, x: net.norm(x)), {"up": {"output": [None, "tp", None]}, "down": {"output": [None] * 3}})
    assert got.partial == ("down.weight", "down.bias", "norm.weight")


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "softmax over it": (
        lambda net, x: x.softmax(-1), BOTH,
        ("parallel.operators: in the model's own forward: _softmax needs all of dim "
         "2, but a rank of tp has only a part of it"),
    ),
    "a mean over all": (
        lambda net, x: x - x.mean(), BOTH,
        "parallel.operators: in the model's own forward: mean of a tensor cut over tp has shape [], which is not one "
        "rank's part of the full model's shape []",
    ),
    "a norm over it": (
        lambda net, x: F.layer_norm(x, (x.shape[-1],)), BOTH,
        "parallel.operators: in the model's own forward: layer_norm needs all of dim 2, but a rank of tp has "
        "only a part of it",
    ),
    "its norm takes all": (
        lambda net, x: net.norm(x), BOTH,
        ("parallel.operators: norm needs all features of its input, which arrives "
         "cut over tp; gather them before the layer (try: "
         "'parallel.operators.norm.input=[null, null, null]')"),
    ),
    "the next layer takes all": (
        lambda net, x: x, {"up": COLUMN},
        ("parallel.operators: down needs all features of its input, which arrives "
         "cut over tp; cut its weight on the features too (try: "
         "'parallel.operators.down.weight=[null, tp]')"),
    ),
    "a whole mask along it": (
        lambda net, x: x * net.mask, BOTH,
        "parallel.operators: the model's own forward fails with the shards that a rank of tp=2 has: "
        "Attempting to broadcast a dimension of length 8 at -1! Mismatching argument at index 1 had torch.Size([8]); "
        "but expected shape should be broadcastable to [4, 10, 4]",
    ),
    "a size taken from it": (
        lambda net, x: x + torch.arange(x.shape[2]), BOTH,
        "parallel.operators: in the model's own forward: arange makes a tensor of [4] where the full model has [8]: "
        "its size comes from a tensor cut over tp",
    ),
    "heads of another order": (
        lambda net, x: x.view(4, 10, 2, -1).transpose(2, 3).flatten(2), BOTH,
        ("parallel.operators: in the model's own forward: view needs all of dim 2, "
         "but a rank of tp has only a part of it"),
    ),
    "a half of it": (
        lambda net, x: torch.cat([x[..., 2:], x[..., :2]], -1), BOTH,
        "parallel.operators: in the model's own forward: slice of a tensor cut over tp has shape [4, 10, 2], which is "
        "not one rank's part of the full model's shape [4, 10, 6]",
    ),
    "dropout": (
        lambda net, x: F.dropout(x, 0.5), BOTH,
        ("parallel.operators: in the model's own forward: bernoulli_ draws random "
         "numbers, which would differ between the ranks of tp"),
    ),
    "code that looks at the size": (
        lambda net, x: x * 2 if x.shape[2] < 8 else x, BOTH,
        "parallel.operators: in the model's own forward: mul runs here with the pieces of a rank, but not in the "
        "full model: the code depends on shapes that are cut",
    ),
    "another output than the loss takes": (
        lambda net, x: x, {"down": {"output": [None, "tp", None]}},
        "parallel.operators.down: the model's output is cut on dim 1 over tp, but the loss takes a full output "
        "or one cut on its classes (try: 'parallel.operators.down.output=[null, null, null]')",
    ),
    "a strategy of another rank": (
        lambda net, x: x, {"down": {"output": [None, "tp"]}},
        "parallel.operators.down: down: output [null, tp] has 2 dims, but the tensor has 3",
    ),
    "a time that does not divide": (
        lambda net, x: x[:, :5], {"down": {"output": [None, "tp", None]}},
        "parallel.operators.down: down: output [null, tp, null] cuts dim 1 of size 5, which is not divisible by tp=2",
    ),
    "a module that is never called": (
        lambda net, x: x, {"norm": {"input": [None, "tp", None]}},
        "parallel.operators.norm: norm is never called by the forward, so there is nothing to cut",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("between", "operators", "text"), list(BAD.values()), ids=list(BAD))
def test_code_that_cannot_run_on_parts_is_refused_with_the_reason(between, operators, text):
    with pytest.raises(RequestError) as caught:
        flow(Net(between), operators)
    assert str(caught.value) == text


class Twice(nn.Module):
    """Uses one gain on a sharded value and on a replicated one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x * self.gain) * self.gain)
        return out


def test_a_parameter_used_both_ways_is_refused():
    with pytest.raises(RequestError) as caught:
        flow(Twice(), BOTH)
    text = "gain combines tensors that are cut over tp with full ones: its gradient is neither full nor a sum"
    assert str(caught.value) == f"parallel.operators: {text}"
