"""Small models: an MLP, a tied pair, a ResNet."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from launcher.job.schema.models import AutoParallelMLP, ResNet, TiedPair
from launcher.models.language_model import Conv, Embedding, Linear


class Network(nn.Module):
    """Samples (batch, ...) of ``features`` values each -> logits (batch, classes)."""

    def __init__(self, settings: AutoParallelMLP) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(settings.features, settings.hidden, bias=False)  # MatMulCell
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Linear(settings.hidden, settings.hidden)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Linear(settings.hidden, settings.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.layer1(self.flatten(x)))
        x = self.relu2(self.layer2(x))
        logits: Tensor = self.layer3(x)
        return logits


class EmbeddingAndHead(nn.Module):
    """Tokens (batch, time) -> logits (batch, time, vocabulary): a bigram model."""

    def __init__(self, settings: TiedPair) -> None:
        super().__init__()
        assert settings.vocab_size is not None
        self.embed = Embedding(settings.vocab_size, settings.dim)
        self.head = Linear(settings.dim, settings.vocab_size)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


class Residual(nn.Module):
    """``body(x)`` added to ``x``, or to its projection where the shapes differ."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.skip = nn.Sequential(Conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def basic(inputs: int, width: int, stride: int) -> Residual:
    body = nn.Sequential(
        Conv(inputs, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(),
        Conv(width, width, 3), nn.BatchNorm2d(width),
    )  # fmt: skip
    return Residual(body, inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """Returns a bottleneck block; the stride is that of the 3x3 convolution, as in ResNet-50 v1.5."""
    body = nn.Sequential(
        Conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(),
        Conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(),
        Conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width),
    )  # fmt: skip
    return Residual(body, inputs, 4 * width, stride)


def _stem(kind: str, channels: int, width: int) -> nn.Sequential:
    if kind == "cifar":
        return nn.Sequential(Conv(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU())
    pool = nn.MaxPool2d(3, 2, padding=1)
    return nn.Sequential(Conv(channels, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(), pool)


class ResidualNetwork(nn.Module):
    """Images (batch, channels, height, width) -> logits (batch, classes)."""

    def __init__(self, settings: ResNet) -> None:
        super().__init__()
        block, grow = (bottleneck, 4) if settings.depth == 50 else (basic, 1)
        w, depths = settings.width, DEPTHS[settings.depth]

        def layer(inputs: int, width: int, n: int, stride: int) -> nn.Sequential:
            rest = (block(grow * width, width, 1) for _ in range(1, n))
            return nn.Sequential(block(inputs, width, stride), *rest)

        self.stem = _stem(settings.stem, settings.channels, w)
        self.layer1 = layer(w, w, depths[0], 1)
        self.layer2 = layer(grow * w, 2 * w, depths[1], 2)
        self.layer3 = layer(grow * 2 * w, 4 * w, depths[2], 2)
        self.layer4 = layer(grow * 4 * w, 8 * w, depths[3], 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(grow * 8 * w, settings.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.layer2(self.layer1(x))
        x = self.layer4(self.layer3(x))
        logits: Tensor = self.fc(self.flatten(self.pool(x)))
        return logits
