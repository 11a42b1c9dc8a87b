"""Only one of several modules that are equal except for their names is recorded; the graph has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.extras.device_matrix.run.record import record
from launcher.extras.device_matrix.run.record_equal_modules import equal_modules, record_ours
from launcher.parallel.trace.tensor_specs import meta
from launcher.planner.plan_job import builder, inputs
from tests.plan.made import job

WIDTH = 4
OURS: dict[str, tuple[list[str], int]] = {
    "tied language model": (["recipe=lm_recursive", "model.layers=7"], 5),
    "untied": (["model=lm_tiny", "model.tied=false", "model.layers=4"], 2),
    "too few layers": (["model=lm_tiny", "model.layers=3"], 0),
    "no two alike": (["model=mlp", "data=mnist5k"], 0),
}
"""The overrides of each model, and how many of its modules are not recorded."""


@pytest.mark.parametrize("name", OURS)
def test_models_of_ours_are_recorded_as_if_all_of_them_ran(name: str) -> None:
    overrides, left_out = OURS[name]
    made = job(*overrides)
    with torch.device("meta"):
        model = builder(made)()
    given = meta(inputs(made, 8))
    assert len(dict(equal_modules(model))) == left_out
    assert record_ours(model, given) == record(model, given, ours=True)


class _Block(nn.Module):
    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.by


class _Chain(nn.Module):
    """Runs layers one after the other, in ``order``."""

    def __init__(self, *by: float, order: list[int] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Block, by))
        self.order = order or list(range(len(by)))

    def forward(self, x: Tensor) -> Tensor:
        for at in self.order:
            x = self.layers[at](x)
        return x


class _Normed(_Block):
    """A block with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))  # type: ignore[no-any-return]


class _Masked(_Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask


class _MaskedChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Masked() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        for layer in self.layers:
            x = layer(x, mask)
        return x


class _Branches(nn.Module):
    """Blocks that share an input, and one that runs between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(6))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        made = [torch.relu(layer(first)) for layer in list(self.layers)[1:4]]
        return self.last(self.layers[5](self.layers[4](sum(made))))  # type: ignore[arg-type]


class _Tables(nn.Module):
    """Layers whose output does not look like their input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(8, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 2).long().clamp(max=7)
        return sum(layer(tokens) for layer in self.layers)  # type: ignore[return-value]


def _tied() -> nn.Module:
    chain = _Chain(1.0, 1.0, 1.0, 1.0, 1.0)
    chain.layers[3].linear.weight = chain.layers[1].linear.weight  # type: ignore[union-attr]
    return chain


def _twice() -> nn.Module:
    chain = _Chain(1.0, 1.0, 1.0, 1.0, 1.0)
    chain.layers[2] = chain.layers[1]
    return chain


MODELS: dict[str, tuple[Any, set[str]]] = {
    "equal": (lambda: _Chain(1.0, 1.0, 1.0, 1.0, 1.0), {"layers.2", "layers.3", "layers.4"}),
    "another number": (lambda: _Chain(1.0, 2.0, 1.0, 1.0, 2.0, 1.0), {"layers.3", "layers.5"}),
    "in another order": (lambda: _Chain(1, 1, 1, 1, order=[3, 1, 0, 2]), {"layers.2", "layers.3"}),
    "one of them twice": (lambda: _Chain(1, 1, 1, 1, order=[0, 1, 2, 3, 2]), {"layers.2", "layers.3"}),
    "one of them never": (lambda: _Chain(1, 1, 1, 1, order=[0, 1, 3]), {"layers.2", "layers.3"}),
    "branches": (_Branches, {"layers.2", "layers.3", "layers.4", "layers.5"}),
    "a mask besides": (_MaskedChain, set()),
    "buffers": (lambda: nn.Sequential(*(_Normed() for _ in range(5))), set()),
    "a shared weight": (_tied, set()),
    "the same module twice": (_twice, set()),
    "what makes another kind of tensor": (_Tables, {"layers.2", "layers.3"}),
}
"""Each model, and the modules that are not recorded at first."""


@pytest.mark.parametrize("name", MODELS)
def test_where_one_cannot_stand_for_another_all_are_recorded(name: str) -> None:
    build, left_out = MODELS[name]
    with torch.device("meta"):
        model = build()
    given = [torch.empty(2, WIDTH, device="meta")]
    assert set(dict(equal_modules(model))) == left_out
    assert record_ours(model, given) == record(model, given, ours=True)
