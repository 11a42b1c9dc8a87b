"""The page on preferences against DPO as its paper writes it, with a policy and a reference that are two models."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pages import write_files

BETA, STEPS = 0.5, 3


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write_files(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("dpo_model", "dpo_data", "dpo_loss"):
        sys.modules.pop(name, None)


class Alone(nn.Module):
    """One of the two by itself: the layers of one side, called one after the other."""

    def __init__(self, both: Any, side: str) -> None:
        super().__init__()
        layers = [both.embed, *both.blocks, both.head]
        self.layers = nn.ModuleList(copy.deepcopy(getattr(layer, side)) for layer in layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = tokens
        for layer in self.layers:
            x = layer(x)
        return x


def answer(model: nn.Module, tokens: Tensor, counted: Tensor) -> Tensor:
    """log p(answer | prompt), token by token."""
    logs = torch.log(torch.softmax(model(tokens), -1))
    total = torch.zeros(len(tokens), dtype=logs.dtype)
    for t in range(1, tokens.shape[1]):
        picked = logs[torch.arange(len(tokens)), t - 1, tokens[:, t]]
        total = total + torch.where(counted[:, t], picked, torch.zeros_like(picked))
    return total


@pytest.mark.usefixtures("page")
def test_every_gradient_is_that_of_two_models() -> None:
    from dpo_data import Sums
    from dpo_loss import DPO
    from dpo_model import Preference

    torch.manual_seed(0)
    both = Preference(vocab=20, dim=16, depth=2).double()
    policy, reference = Alone(both, "policy"), Alone(both, "reference")
    chosen, rejected = (torch.stack(x) for x in zip(*(Sums(81)[i][:2] for i in range(16)), strict=True))
    target = torch.linspace(0.5, 2, 16, dtype=torch.float64)
    ours = torch.optim.SGD([p for p in both.parameters() if p.requires_grad], lr=0.5)
    theirs = torch.optim.SGD(policy.parameters(), lr=0.5)

    for step in range(STEPS):
        total, count = DPO(BETA)(both(chosen, rejected), target)
        loss = total / count
        ours.zero_grad()
        loss.backward()

        # -log sigmoid(beta (log pi(w)/ref(w) - log pi(l)/ref(l)))
        ratios = []
        for tokens in (chosen, rejected):
            ids, counted = tokens.abs(), tokens >= 0
            with torch.no_grad():
                before = answer(reference, ids, counted)
            ratios.append(answer(policy, ids, counted) - before)
        want = (-torch.log(torch.sigmoid(BETA * (ratios[0] - ratios[1]))) * target).sum() / target.sum()
        theirs.zero_grad()
        want.backward()

        assert loss.item() == pytest.approx(want.item(), rel=1e-12)
        if not step:
            assert loss.item() == pytest.approx(torch.log(torch.tensor(2.0, dtype=torch.float64)).item(), rel=1e-12)
        grads = [p.grad for layer in (both.embed, *both.blocks, both.head) for p in layer.policy.parameters()]
        for got, wanted in zip(grads, policy.parameters(), strict=True):
            torch.testing.assert_close(got, wanted.grad, rtol=1e-10, atol=1e-14)
        ours.step()
        theirs.step()
    assert all(p.grad is None for name, p in both.named_parameters() if ".reference." in name)
