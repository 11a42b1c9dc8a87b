"""The network of AutoParallel's own example."""

from __future__ import annotations

import torch

from launcher.job.schema.models import AutoParallelMLP
from launcher.models.build import build_model


def test_the_mlp_has_the_modules_of_autoparallels_own_example_in_order():
    model = build_model(AutoParallelMLP(name="mlp"))
    assert [n for n, _ in model.named_children()] == ["flatten", "layer1", "relu1", "layer2", "relu2", "layer3"]
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes == [(512, 784), (512, 512), (512,), (10, 512), (10,)]
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
