"""Writes into a part of a tensor: seen in the graph, and recorded as new tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.errors import RequestError
from launcher.parallel.sharding.record import record
from tests.parallel.sharding.cases.case import Calls, Case, module, real
from tests.parallel.sharding.operator_laws import recorded


def _columns(x: Tensor) -> Tensor:
    m = torch.zeros(6, 6, dtype=x.dtype)
    m[:, 2:] = 1.0
    m[0].mul_(3)
    return x @ m


def _viewed_before(x: Tensor) -> Tensor:
    y = x * 2
    flat = y.view(-1)
    y.relu_()
    return flat


def _viewed_after(x: Tensor) -> Tensor:
    y = (x * 2).relu_()
    return y.view(-1).sigmoid_() + y.sum()


def _residual(x: Tensor) -> Tensor:
    y = x * 2
    return F.relu(y + x, inplace=True) + y


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": _columns,
    "viewed before": _viewed_before,
    "viewed after": _viewed_after,
    "residual": _residual,
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_recorded_computes_what_the_model_does(name: str) -> None:
    x = real(4, 6)
    run = recorded(Calls(Case(WRITES[name], (x,))), [x])
    assert torch.equal(run.values[run.graph.outputs[0]], WRITES[name](x.detach()))


def test_only_writes_that_are_seen_elsewhere_are_recorded_another_way() -> None:
    x = torch.empty(4, 6, device="meta")
    kept = {name: [n.op for n in record(Calls(Case(f, (x,))), [x]).nodes] for name, f in WRITES.items()}
    assert {name for name, ops in kept.items() if any(op.endswith("_") or "_." in op for op in ops)} == {"residual"}


def test_a_write_that_must_reach_a_buffer_is_refused() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            self.kept[:, 2:] = x[:, 2:].detach()
            return self.kept + x

    with torch.device("meta"), pytest.raises(RequestError) as error:
        record(Cache(), [torch.empty(4, 6)])
    assert error.value.problems[0].text == (
        "the model writes into a part of a tensor that is used as a whole (copy_), and the model has buffers that it "
        "writes into too"
    )
    assert error.value.problems[0].cure == "make a new tensor of the parts, with torch.cat or torch.where"


def test_a_count_in_a_buffer_is_no_such_write() -> None:
    graph = record(module(nn.BatchNorm1d, 6).to("meta"), [torch.empty(4, 6, device="meta", dtype=torch.float64)])
    assert [n.op for n in graph.nodes] == ["add_.Tensor", "batch_norm"]
