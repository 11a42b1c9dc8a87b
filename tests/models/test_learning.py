"""The models learn from real data."""

from __future__ import annotations

import pytest
import torch

from launcher.data.open import open_data
from launcher.data.shuffle import batch_indices
from launcher.job.schema.data import Mnist5k, Text
from launcher.job.schema.models import AutoParallelMLP, LanguageModel, ResNet, TiedPair
from launcher.job.schema.optim import AdamW, Momentum
from launcher.models.build import build_model
from launcher.objective.losses import cross_entropy
from launcher.optim.build import build_optimizer
from tests.optim.grouped import grouped

TEXT = Text(name="text", seq_len=32)
DIGITS = Mnist5k(name="mnist5k")
ADAM = AdamW(name="adamw", lr=0.01)
CASES = {
    "lm": (LanguageModel(name="lm", vocab_size=256, dim=32, layers=2, heads=2), TEXT, ADAM, 16, 30),
    "tied_pair": (TiedPair(name="tied_pair", vocab_size=256), TEXT, ADAM, 16, 30),
    "mlp": (AutoParallelMLP(name="mlp", hidden=32), DIGITS, ADAM, 32, 20),
    "resnet18": (ResNet(name="resnet", depth=18, width=4, channels=1), DIGITS, Momentum(name="momentum"), 32, 30),
}


@pytest.mark.parametrize(("model", "data", "optim", "batch", "steps"), CASES.values(), ids=CASES)
def test_a_few_steps_on_real_data_lower_the_loss_on_samples_not_seen(model, data, optim, batch, steps):
    torch.manual_seed(0)
    net, samples = build_model(model), open_data(data, seed=0)
    optimizer = build_optimizer(optim, grouped(optim, net.named_parameters()))

    def loss(source, rows):
        return cross_entropy(net(*source.inputs(rows)), source.targets(rows))

    held_out = batch_indices(0, 0, 64, len(samples.val))
    before = loss(samples.val, held_out).item()
    for step in range(steps):
        loss(samples.train, batch_indices(0, step, batch, len(samples.train))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss(samples.val, held_out).item() < 0.75 * before
