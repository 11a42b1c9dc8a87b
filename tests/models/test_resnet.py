"""Residual networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.job.schema.models import ResNet
from launcher.models.build import build_model


@pytest.mark.parametrize(("depth", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_the_imagenet_networks_have_the_known_number_of_parameters(depth, count):
    with torch.device("meta"):
        model = build_model(ResNet(name="resnet", depth=depth, classes=1000, stem="imagenet"))
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("stem", "first", "last"), [("imagenet", 16, 2), ("cifar", 64, 8)])
def test_the_cifar_stem_keeps_the_size_and_the_imagenet_stem_quarters_it(stem, first, last):
    with torch.device("meta"):
        model = build_model(ResNet(name="resnet", depth=50, stem=stem, channels=1))
        x = model.layer1(model.stem(torch.empty(2, 1, 64, 64)))
        assert x.shape == (2, 256, first, first)
        assert model.layer4(model.layer3(model.layer2(x))).shape == (2, 2048, last, last)
        assert model(torch.empty(2, 1, 64, 64)).shape == (2, 10)


def test_modules_have_the_promised_names_and_layers_are_sequences_of_blocks():
    with torch.device("meta"):
        model = build_model(ResNet(name="resnet", depth=34))
    layers = ["layer1", "layer2", "layer3", "layer4"]
    assert [n for n, _ in model.named_children()] == ["stem", *layers, "pool", "flatten", "fc"]
    assert [len(getattr(model, n)) for n in layers] == [3, 4, 6, 3]
    assert all(isinstance(getattr(model, n), nn.Sequential) for n in layers)


def test_a_block_adds_its_input():
    block = build_model(ResNet(name="resnet", depth=18, width=4)).layer1[0]
    for p in block.body.parameters():
        nn.init.zeros_(p)
    x = torch.rand(1, 4, 5, 5)
    assert torch.equal(block(x), x)
