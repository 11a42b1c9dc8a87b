"""The judge of the zoo detects small errors, and survives what it judges."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.zoo import cell, document, oracle, table
from tests.parity.zoo.case import ABCD, Case, D, Net, block
from tests.parity.zoo.layouts import LAYOUTS


class Dies(Net):
    """Ends its process in a rank."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and torch.distributed.is_initialized():
            os._exit(3)
        return super().forward(x)


class Raises(Net):
    """Fails in a rank."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.distributed_c10d._world.pg_map:
            raise KeyError("odd")
        return super().forward(x)


class Sleeps(Net):
    """Never returns from a rank. A hook on a module sleeps, because the code between modules does not run there."""

    def extra(self) -> None:
        self.b.register_forward_pre_hook(_sleep)


def _sleep(*_: object) -> None:
    if torch.distributed.distributed_c10d._world.pg_map:
        time.sleep(600)


class Illegal(Net):
    """Plain torch cannot train this model either."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)).tanh_().mul_(2)))


class Differs(Net):
    """Computes something else on ranks: the relative difference is 1e-11."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * (1 + 1e-11) if torch.distributed.is_initialized() else out


class Starts(Net):
    """Initializes a weight differently when the launcher builds it."""

    def extra(self) -> None:
        if any("launcher/parallel" in frame.filename for frame in traceback.extract_stack()):
            torch.nn.init.normal_(self.a[0].weight)


class CountsModes(Net):
    """Counts the calls of ``train``, of which a loop makes one before its first step."""

    calls = 0

    def train(self, mode: bool = True) -> CountsModes:
        self.calls += 1
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.calls


class HandedOutMerged(Net):
    """Low-rank additions that the constructor merges into a weight and ``train`` removes."""

    def extra(self) -> None:
        self.left, self.right = torch.nn.Parameter(torch.ones(D, 1)), torch.nn.Parameter(torch.ones(1, D) / 3)
        self.merged = False
        self.eval()

    def train(self, mode: bool = True) -> HandedOutMerged:
        super().train(mode)
        if self.merged is mode:
            with torch.no_grad():
                self.d.weight.add_(self.left @ self.right, alpha=-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.a(x)))
        return self.d(h) if self.merged else self.d(h) + h @ (self.left @ self.right).T


@pytest.mark.parametrize("cls", [CountsModes, HandedOutMerged])
def test_a_loop_puts_a_model_into_training_mode_once(cls: type[Net]) -> None:
    found = judged(cls)
    assert (found.kind, found.text) == ("exact", found.text)


def judged(cls: type[Net], layout: str = "one rank") -> cell.Verdict:
    return table.run([Case(cls, ABCD)], [layout], jobs=1)[cls.__name__][layout]


@pytest.mark.parametrize(
    ("cls", "kind", "text"),
    [
        (Dies, "CRASH", "exit: ended with exit code 3 and no Python error"),
        (Raises, "CRASH", "KeyError: 'odd'"),
        (Starts, "WRONG", "at the start: a.0.weight has std "),
        (Differs, "WRONG", "norm at step 1 by "),
        (Illegal, "ILLEGAL", "RuntimeError: one of the variables needed for gradient computation has been modified"),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_the_judge_names_every_kind_of_failure(cls: type[Net], kind: str, text: str) -> None:
    found = judged(cls)
    assert (found.kind, found.text[: len(text)]) == (kind, text)


def test_a_model_that_never_comes_back_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell, "LIMIT_S", 3)
    assert judged(Sleeps, "pp2").kind == "HANG"


def test_an_expected_number_is_one_of_plain_torch() -> None:
    """One step of the oracle, computed by hand, for one model and one micro batch."""
    torch.manual_seed(0)
    terms = oracle.Terms(replicas=1, micros=1, batch=4, steps=1, samples=4, optim="sgd", clip=1e9)
    x, y = torch.randn(4, D, dtype=torch.float64), torch.tensor([0, 1, -100, 3])
    model = torch.nn.Sequential(block(), torch.nn.Linear(D, D)).double()
    start = {n: t.detach().clone() for n, t in model.state_dict().items()}

    default = torch.get_default_dtype()
    try:
        got = oracle.train(
            lambda: torch.nn.Sequential(block(), torch.nn.Linear(D, D)), start, lambda i: ((x[i],), y[i]), terms
        )
    finally:
        torch.set_default_dtype(default)

    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    assert got.steps[0].loss == pytest.approx(loss.item(), rel=1e-14)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.allclose(got.steps[0].grads[name], p.grad, rtol=1e-12, atol=1e-15)
        decayed = p.grad + (0.1 * p if p.ndim > 1 else 0)
        assert torch.allclose(got.weights[name], p - 0.1 * decayed, rtol=1e-12, atol=1e-15)


def test_the_layouts_are_those_of_the_proof() -> None:
    assert {n: (at.ranks, at.stages) for n, at in LAYOUTS.items()} == {
        "one rank": (1, 1), "pp2": (2, 2), "pp2 shard2 level1": (4, 2), "pp2 shard2 level3": (4, 2),
        "pp3 zero_bubble_h1": (3, 3),
        "shard4 level2": (4, 1), "replicate2 shard2": (4, 1), "zero_bubble_v shard2 level2": (4, 2),
        "shard2 level3": (2, 1), "pp2 recompute": (2, 2), "shard2 level3 selective": (2, 1),
        "searched": (2, 1), "pp2 searched level2": (4, 2), "interleaved searched": (4, 2),
    }  # fmt: skip


def test_a_part_of_the_page_can_be_written_anew() -> None:
    text = (Path(__file__).parents[3] / "docs" / "zoo.md").read_text()
    assert document.updated(text, {}) == text
    row = dict.fromkeys(LAYOUTS, cell.Verdict("exact")) | {"pp2": cell.Verdict("refused", "model: odd")}
    new = document.updated(text, {"Plain": row})
    assert "| `Plain`: Four blocks in a row: this must always work | exact | refused [1](#1) | exact |" in new
    assert '1. <a id="1"></a>`model: odd`' in new
    assert len(new.splitlines()) == len(text.splitlines()) + 1
