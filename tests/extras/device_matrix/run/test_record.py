"""A forward recorded as operators on values: writes in place and no_grad are kept, autocast is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.errors import RequestError
from launcher.extras.device_matrix.run.record import OTHERWISE, record
from tests.extras.device_matrix.run.cases.case import Calls, Case, module, real
from tests.extras.device_matrix.run.operator_laws import recorded


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
    y = (x * 2).add_(1)
    return y.view(-1).sigmoid_() + y.sum()


def _residual(x: Tensor) -> Tensor:
    y = x * 2
    return F.relu(y + x, inplace=True) + y


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        y = x * 2
    return x + y


WRITES: list[Callable[[Tensor], Tensor]] = [_columns, _viewed_before, _viewed_after, _residual, _without_gradient]


@pytest.mark.parametrize("forward", WRITES)
def test_a_recording_computes_the_values_of_the_forward(forward: Callable[[Tensor], Tensor]) -> None:
    x = real(4, 6)
    run = recorded(Calls(Case(forward, (x,))), [x])
    assert torch.equal(run.values[run.graph.outputs[0]], forward(x.detach()))


def test_where_no_grad_begins_the_gradient_ends() -> None:
    x = torch.empty(4, 6, device="meta", requires_grad=True)
    graph = record(Calls(Case(_without_gradient, (x,))), [x])
    found = [(n.op, graph.values[n.outs[0]].trains) for n in graph.nodes]
    assert found == [("detach", False), ("mul.Tensor", False), ("add.Tensor", True)]


def test_buffers_that_norms_change_are_values() -> None:
    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("var", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.mean, self.var, training=True)

    with torch.device("meta"):
        assert [name for name, _ in record(Whitened(), [torch.empty(4, 6)]).changes] == ["mean", "var"]


class _Autocast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class _Spectrum(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        out = torch.zeros_like(spectrum)
        out[:, :2] = spectrum[:, :2] * self.weight
        return torch.fft.irfft(out, n=x.shape[1], dim=1)


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "autocast": (
        module(_Autocast, 6, 6),
        "the forward computes under torch.autocast, whose dtypes would be lost; cast with .to instead",
    ),
    "complex": (
        nn.Sequential(_Spectrum()),
        "0 changes a part of a complex tensor in place; a recording calls slice_scatter instead, which torch cannot "
        f"differentiate for complex numbers; {OTHERWISE}",
    ),
    "instance norm": (
        nn.Sequential(module(nn.InstanceNorm1d, 4, track_running_stats=True)),
        "0: instance norm that updates running statistics has no rule over device matrices; "
        f"set track_running_stats=False, or {OTHERWISE}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_that_a_recording_would_change_is_refused(name: str) -> None:
    made, text = REFUSED[name]
    with pytest.raises(RequestError) as error:
        record(made.to("meta"), [torch.empty(2, 4, 6, device="meta", dtype=torch.float64)])
    assert [(p.key, p.text) for p in error.value.problems] == [("parallel.operators", text)]
