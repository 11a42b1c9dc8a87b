"""The documented DPO loss equals that of its paper, with a policy and a reference that are two models."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.objective import trained
from tests.pages import write_files
from tests.parity import job, plain
from tests.tiers import some

BETA, STEPS = 0.5, 3


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write_files(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("dpo_model", "dpo_data", "dpo_loss"):
        sys.modules.pop(name, None)


class Alone(nn.Module):
    """The policy or the reference alone: the layers of one side, called one after another."""

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


def by_the_paper(policy: nn.Module, reference: nn.Module, pairs: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta (log pi(w)/ref(w) - log pi(l)/ref(l))), and the share of pairs where that is positive."""
    ratios = []
    for tokens in pairs:
        ids, counted = tokens.abs(), tokens >= 0
        with torch.no_grad():
            before = answer(reference, ids, counted)
        ratios.append(answer(policy, ids, counted) - before)
    gained = ratios[0] - ratios[1]
    loss = (-torch.log(torch.sigmoid(BETA * gained)) * weight).sum() / weight.sum()
    return loss, (gained > 0).double().mean()


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

        want, _ = by_the_paper(policy, reference, [chosen, rejected], target)
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


SHARD: dict[str, Any] = {"shard_size": 2, "threshold": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pipeline": {"stages": 2, "micro_batch_num": 2}},
    "level1": {"hsdp": SHARD},
    "level2 x pp2": {"pipeline": {"stages": 2}, "hsdp": SHARD | {"optimizer_level": "level2"}},
    "level3": {"pipeline": {"micro_batch_num": 2}, "hsdp": SHARD | {"optimizer_level": "level3"}},
    "interleaved": {"pipeline": {"stages": 2, "interleave": True, "micro_batch_num": 4}},
    "zero bubble": {"pipeline": {"stages": 2, "scheduler": "zero_bubble_h1", "micro_batch_num": 4}},
}


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize("layout", some(LAYOUTS, one_in=2))
def test_dpo_trains_as_two_models_on_every_layout(layout: str, tmp_path: Path) -> None:
    from dpo_data import Sums

    asked = job(
        parallel=LAYOUTS[layout],
        model={"_target_": "dpo_model.Preference", "vocab": 20, "dim": 16, "depth": 2},
        data={"_target_": "dpo_data.Sums", "pairs": 8, "val": {"pairs": 5}},
        loss={"_target_": "dpo_loss.DPO", "beta": BETA},
        metrics=[{"_target_": "dpo_loss.Preferred"}],
        security__allow=("dpo_model", "dpo_data", "dpo_loss"),
        optim={"name": "sgd", "lr": trained.LR},
        train__steps=trained.STEPS,
    )
    ((plan, got),) = trained.on_layouts({layout: asked}, tmp_path).values()

    # the batch contains all samples
    both = plain(asked, plan)
    policy, reference = Alone(both, "policy"), Alone(both, "reference").requires_grad_(False)

    def of(pairs: int) -> tuple[Tensor, Tensor]:
        answers = [torch.stack(x) for x in zip(*(Sums(pairs)[i][:2] for i in range(pairs)), strict=True)]
        return by_the_paper(policy, reference, answers, torch.ones(pairs, dtype=torch.float64))

    want = trained.alone(policy, lambda: of(8)[0])
    loss, preferred = of(5)
    want.held_out = {"val_loss": loss.item(), "val_preferred": preferred.item()}

    # under the names of the module that contains both
    names = {}
    for n, layer in enumerate([both.embed, *both.blocks, both.head]):
        mine = next(name for name, module in both.named_modules() if module is layer)
        names |= {f"layers.{n}.{name}": f"{mine}.policy.{name}" for name, _ in layer.policy.named_parameters()}
    frozen = {n: p.detach() for n, p in both.named_parameters() if ".reference." in n}
    want.grads = [{names[n]: g for n, g in step.items()} for step in want.grads]
    want.weights = {names[n]: w for n, w in want.weights.items()} | frozen
    trained.assert_same(got, want)
    assert all(torch.equal(got.weights[n], w) for n, w in frozen.items())
