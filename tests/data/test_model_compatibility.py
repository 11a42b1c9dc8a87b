"""Which models can read which data."""

from __future__ import annotations

import pytest

from launcher.data.spec import check_fit
from launcher.job.schema.data import Cifar10, Idx, Mnist5k, Text
from launcher.job.schema.models import AutoParallelMLP, HuggingFace, LanguageModel, ResNet, TiedPair
from launcher.job.schema.user_class import Target

TEXT = Text(name="text", seq_len=16)
DIGITS = Mnist5k(name="mnist5k")


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (LanguageModel(name="lm", vocab_size=256), TEXT),
        (TiedPair(name="tied_pair", vocab_size=300), TEXT),
        (ResNet(name="resnet", channels=1), DIGITS),
        (AutoParallelMLP(name="mlp"), DIGITS),
        (AutoParallelMLP(name="mlp"), Idx(name="idx", root="x")),
        (Target(_target_="a.B"), DIGITS),
        (LanguageModel(name="lm", vocab_size=1), Target(_target_="a.B")),
    ],
)
def test_models_that_fit_their_data(model, data):
    assert check_fit(model, data) == []


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (
            LanguageModel(name="lm", vocab_size=100),
            TEXT,
            "model.vocab_size: 100 are too few for the 256 tokens of data text (try: model.vocab_size=256)",
        ),
        (LanguageModel(name="lm", vocab_size=256), DIGITS, "model: model lm reads tokens, data mnist5k has images"),
        (
            HuggingFace(name="hf", path="x"),
            DIGITS,
            "model: model hf of task causal_lm reads tokens, data mnist5k has images",
        ),
        (
            HuggingFace(name="hf", path="x", task="image_classification"),
            TEXT,
            "model: model hf of task image_classification reads images, data text has tokens",
        ),
        (ResNet(name="resnet"), TEXT, "model: model resnet reads images, data text has tokens"),
        (
            ResNet(name="resnet", classes=3),
            DIGITS,
            "model.channels: 3 does not fit data mnist5k, whose images are 1 x 28 x 28 (try: model.channels=1)\n"
            "model.classes: 3 are too few for the 10 classes of data mnist5k (try: model.classes=10)",
        ),
        (
            AutoParallelMLP(name="mlp"),
            Cifar10(name="cifar10", root="x"),
            "model.features: 784 does not fit data cifar10, whose images are 3 x 32 x 32 (try: model.features=3072)",
        ),
    ],
    ids=["vocabulary", "tokens", "hf tokens", "hf images", "images", "both", "features"],
)
def test_models_that_do_not_fit_their_data(model, data, said):
    assert "\n".join(map(str, check_fit(model, data))) == said
